"""The texts of a submission to the Adversarial Pruning Benchmark: the issue, the checklist, the normalisation."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

EPSILON = 0.031
FORM = "https://forms.gle/M4gzq2BEC6CzZhPv7"
ISSUES = "https://github.com/pralab/AdversarialPruningBenchmark/issues/new/choose"

Normalisation = tuple[list[float], list[float]]  # mean and std of each channel
_CLAIMS = ("clean", "autoattack", "fmn")


def _percent(claim: Mapping[str, Any] | None) -> str:
    return "not measured" if claim is None else f"{claim['value']:.2f}"


def results(model: Mapping[str, Any]) -> str:
    """The lines of the issue's template that hold a model's numbers."""
    return (
        f"_Clean Accuracy:_ {_percent(model['clean'])}\n"
        f"_Robust Accuracy (AA):_ {_percent(model['autoattack'])}\n"
        f"_Robust Accuracy (HO-FMN):_ {_percent(model['fmn'])}\n"
    )


def issue(entry: Mapping[str, str], models: Sequence[Mapping[str, Any]]) -> str:
    """The text of the issue, in the order of the benchmark's template."""
    lines = [f"# New AP method: {entry['ap_key']}", "", "## JSON Entry", "", "```json"]
    lines += [json.dumps(entry, indent=2, ensure_ascii=False), "```", ""]
    for number, model in enumerate(models, start=1):
        place = f'"{model["key"]}" : ["your_gdrive_link_id", "'
        lines += [f"## Evaluation Results of Model n°{number}", ""]
        lines += [f'_Model GDrive:_ {place}.pt"]', f'_Distances GDrive:_ {place}.pickle"]', "", results(model)]
    lines += ["## Architecture details and normalization", ""]
    lines += [
        "All checkpoints load with `strict=True` into the base models; masks are multiplied in. Weights kept, of all "
        "convolutions and linear layers:",
        "",
        "| model | kept | of | sparsity | images (clean, AA, FMN) | seed |",
        "|---|---|---|---|---|---|",
    ]
    for model in models:
        counts = ", ".join("–" if model[name] is None else f"{model[name]['n']:,}" for name in _CLAIMS)
        sparsity = f"{1 - model['kept'] / model['size']:.3%}"
        cells = [model["key"], f"{model['kept']:,}", f"{model['size']:,}", sparsity, counts, str(model["seed"])]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_channels_text(models), *_normalisation_text(models), ""]
    lines += [
        f"AutoAttack: L-inf, epsilon {EPSILON}. Distances: FMN, not tuned by HO-FMN; robust if above 8/255; a point "
        "that was never broken has an infinite distance and counts as robust. The distances files are pickles of plain "
        "lists of floats.",
        "",
    ]
    return "\n".join(lines)


def _channels_text(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is said of the models that channels were pruned of."""
    found = [(model["key"], model["channels"]) for model in models if model["channels"]]
    if not found:
        return []
    lines = ["Whole channels were pruned of these models; they are zero in the checkpoints. Channels kept:", ""]
    for key, left in found:
        budget = left["budget"]
        shares = [f"{part['kept']:,} of {part['size']:,}" for part in (left, budget)]
        lines.append(f"- {key}: {shares[0]}; {shares[1]} {budget['unit']} ({budget['kept'] / budget['size']:.3%})")
    return [*lines, ""]


def _normalisation_text(models: Sequence[Mapping[str, Any]]) -> list[str]:
    needed = [model for model in models if model["normalisation"]]
    if not needed:
        return ["No model needs normalisation: inputs are images in [0, 1]."]
    lines = [
        "These models need images in [0, 1] normalised as (x - mean) / std (see the attached `normalised.py`):",
        "",
    ]
    for model in needed:
        mean, std = model["normalisation"]
        lines.append(f"- {model['key']}: mean {_numbers(mean)}, std {_numbers(std)}")
    return lines


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"


def definition(declared: Mapping[str, Normalisation]) -> str:
    """The file that says what the normalisation of a model is."""
    table = "".join(f"    {key!r}: {tuple(map(tuple, values))!r},\n" for key, values in declared.items())
    return f'''"""The normalisation that some of the submitted models need in front of the benchmark's base models."""

import torch
from torch import nn

MEAN_AND_STD = {{
{table}}}


class Normalised(nn.Module):
    """A base model behind (x - mean) / std, for images in [0, 1]."""

    def __init__(self, net, key):
        super().__init__()
        mean, std = MEAN_AND_STD[key]
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.net = net

    def forward(self, x):
        return self.net((x - self.mean) / self.std)
'''


def checklist(models: Sequence[Mapping[str, Any]], problems: Sequence[str]) -> str:
    """What is left to a person."""
    todo = [
        f"Fill in the benchmark's form ({FORM}) with the values of `taxonomy.json`; it sends the entry back by e-mail. "
        "Put that entry into `ISSUE.md` if it differs.",
        "Put each file of `checkpoints/` and `distances/` on Google Drive, open to everyone with the link.",
        f"In `ISSUE.md`, put the id of each link in place of `your_gdrive_link_id` ({2 * len(models)} places).",
        f"Open an issue with the text of `ISSUE.md`: {ISSUES}",
    ]
    lines = ["# What is left to do", "", *(f"- [ ] {each}" for each in todo), ""]
    lines += ["## Problems found", "", *(f"- {line}" for line in problems or ["none"]), ""]
    return "\n".join(lines)
