"""Checks that an artefact is the network it is assumed to be, and that its accuracies are plausible."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harp.deploy.exported_eval.manifest import Origin
from harp.deploy.exported_eval.open import Artefact
from harp.evaluation.model_checks import Finding, Verdict, graded

Test = Mapping[str, Any]

_OFF = 1e-3  # share of the largest logit; rounding of the same weights stays below it


def integrity(artefact: Artefact, origin: Origin) -> list[Finding]:
    """Compare the file's hash with the manifest beside it."""
    if origin.unlisted:
        text = "the manifest beside the file does not list it: nothing that it says was taken for this network"
        return [Finding("integrity", "look", text)]
    listed = origin.sha256_of(artefact.path.name)
    if listed is None:
        return []
    if listed == artefact.sha256:
        return [Finding("integrity", "good", "the file has the SHA-256 that its manifest gives it")]
    hashes = f"the file's SHA-256 begins with {artefact.sha256[:12]}, the manifest's with {listed[:12]}"
    text = f"{hashes}: it was changed since"
    return [Finding("integrity", "bad", text)]


def stated(measured: Mapping[str, Any], origin: Origin) -> list[Finding]:
    """Compare the natural accuracy with the one that the run or the manifest states."""
    natural = [result for result in origin.accuracies if _is_natural(result)]
    if not natural or natural[-1].get("data", measured["data"]) != measured["data"]:
        return []
    statement = natural[-1]
    low, high = (
        float(statement[key]) if _is_number(statement.get(key)) else float(statement["value"])
        for key in ("low", "high")
    )
    text = f"natural accuracy {measured['value']:.1%} as deployed, {statement['value']:.1%} was stated"
    if measured["high"] < low:
        return [
            Finding("stated accuracy", "bad", f"{text}: this is not the network that was measured, or it is damaged")
        ]
    if measured["low"] > high:
        return [Finding("stated accuracy", "look", f"{text}: this is not the network that was measured")]
    return [Finding("stated accuracy", "good", text)]


def agreement(measured: Mapping[str, Any], words: str, *, exact: bool) -> Finding:
    """Compare the artefact with a torch network; if not `exact`, its roundings differ."""
    n, different = measured["n"], measured["n"] - measured["agree"]
    text = (
        f"{measured['agree']:,} of {n:,} clean predictions are those of {words}, logits differ by at most "
        f"{measured['difference']:.2g} ({measured['relative']:.1g} of the largest)"
    )
    if not exact:
        verdict = graded(different / n, 0.02, 0.1)
        advice = "" if verdict == "good" else ": rounding should not cost as much; is the artefact of this network?"
        return Finding("agreement", verdict, text + advice)
    verdict = graded(different / n, 0.002, 0.02)
    if verdict == "good" and measured["relative"] > _OFF:
        verdict = "look"
    advice = "" if verdict == "good" else ": the artefact does not compute what its twin computes"
    return Finding("agreement", verdict, text + advice)


def determinism(artefact: Artefact, images: torch.Tensor) -> Finding:
    """Check that an image gets the same logits again, and in another batch the same up to rounding."""
    first, again = artefact.model(images), artefact.model(images)
    if not torch.equal(first, again):
        text = "the same image gives other logits: what an attack finds may not hold"
        return Finding("artefact's answers", "bad", text)
    alone = torch.cat([artefact.model(image[None]) for image in images])
    error, largest = float((first - alone).abs().max()), max(float(first.abs().max()), 1e-30)
    if error > _OFF * largest:
        text = f"with other images beside it, an image's logits are off by {error:.2g}: they must depend on it alone"
        return Finding("artefact's answers", "bad", text)
    return Finding("artefact's answers", "good", "the artefact's answer depends on nothing but the image")


def replays(natural: Test, tests: Sequence[Test]) -> list[Finding]:
    """Check that images that fool the twin also fool the artefact: otherwise its robust accuracy is too high."""
    replayed = [test for test in tests if test["how"] == "replayed"]
    findings = []
    for test in replayed:
        pairs = list(zip(test["torch"]["images"], test["deployed"]["images"], strict=True))
        fooled = sum(before == "0" for before, _ in pairs)
        missed = sum(before == "0" and after == "1" for before, after in pairs)
        text = f"{test['name']}: of {fooled:,} images that the twin gets wrong the artefact gets {missed:,} right"
        verdict = graded(missed / len(pairs), 0.01, 0.05) if missed > 1 else "good"
        advice = (
            "" if verdict == "good" else ": its robust accuracy may be too high; give a --twin of the very same weights"
        )
        findings.append(Finding("replay", verdict, text + advice))
    if replayed:
        only = sum(
            a == "0" and b == "1"
            for a, b in zip(natural["torch"]["images"], natural["deployed"]["images"], strict=True)
        )
        if only:
            n = natural["deployed"]["n"]
            text = (
                f"{only:,} of {n:,} clean images are right in the artefact only: gradients had nothing to attack there"
            )
            findings.append(Finding("replay", graded(only / n, 0.01, 0.05), text))
    return findings


def queries(tests: Sequence[Test]) -> list[Finding]:
    """Check whether queries fool the artefact on images that the replayed adversarials do not."""
    white = [test["deployed"]["images"] for test in tests if test["how"] == "replayed"]
    findings = []
    for test in (test for test in tests if test["how"] == "queries" and white):
        robust = [set(bits) == {"1"} for bits in zip(*white, strict=True)]
        broken = sum(
            was_robust and bit == "0" for was_robust, bit in zip(robust, test["deployed"]["images"], strict=True)
        )
        text = f"{test['name']} fools {broken:,} of {sum(robust):,} images that the replayed adversarials leave right"
        weak = broken > 1 and broken > 0.05 * sum(robust)
        verdict: Verdict = "look" if weak else "good"
        advice = ": the attacks on the twin are too weak, the union counts; add --attack autoattack" if weak else ""
        findings.append(Finding("black box", verdict, text + advice))
    return findings


def _is_natural(result: Mapping[str, Any]) -> bool:
    return result.get("name") == "natural" and _is_number(result.get("value"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
