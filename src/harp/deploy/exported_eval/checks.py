"""Checks that an artefact is the network it is assumed to be, and that its accuracies are plausible."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harp.deploy.exported_eval.open import Artefact
from harp.deploy.exported_eval.twin import Origin
from harp.evaluation.model_checks import Finding, Verdict, graded

Test = Mapping[str, Any]

_ROUNDING = 1e-3  # share of the largest logit; rounding of the same weights stays below it


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
    return [Finding("integrity", "bad", f"{hashes}: it was changed since")]


def stated(measured: Test, origin: Origin) -> list[Finding]:
    """Compare the natural accuracy with the one that the run or the manifest states."""
    natural = [
        result for result in origin.accuracies if result.get("name") == "natural" and _is_number(result, "value")
    ]
    if not natural or natural[-1].get("data", measured["data"]) != measured["data"]:
        return []
    value = float(natural[-1]["value"])
    low, high = (float(natural[-1][key]) if _is_number(natural[-1], key) else value for key in ("low", "high"))
    text = f"natural accuracy {measured['value']:.1%} as deployed, {value:.1%} was stated"
    verdict: Verdict = "bad" if measured["high"] < low else "look" if measured["low"] > high else "good"
    advice = {
        "good": "",
        "look": ": this is not the network that was measured",
        "bad": ": this is not the network that was measured, or it is damaged",
    }[verdict]
    return [Finding("stated accuracy", verdict, text + advice)]


def agreement(measured: Test, words: str, *, exact: bool) -> Finding:
    """Compare the artefact with a torch network; if not `exact`, its roundings differ."""
    n, different = measured["n"], measured["n"] - measured["agree"]
    text = (
        f"{measured['agree']:,} of {n:,} clean predictions are those of {words}, logits differ by at most "
        f"{measured['difference']:.2g} ({measured['relative']:.1g} of the largest)"
    )
    if exact:
        verdict = graded(different / n, 0.002, 0.02)
        if verdict == "good" and measured["relative"] > _ROUNDING:
            verdict = "look"
        advice = ": the artefact does not compute what its twin computes"
    else:
        verdict = graded(different / n, 0.02, 0.1)
        advice = ": rounding should not cost as much; is the artefact of this network?"
    return Finding("agreement", verdict, text if verdict == "good" else text + advice)


def determinism(artefact: Artefact, images: torch.Tensor) -> Finding:
    """Check that an image gets the same logits again, and in another batch the same up to rounding."""
    name, first = "artefact's answers", artefact.model(images)
    if not torch.equal(first, artefact.model(images)):
        return Finding(name, "bad", "the same image gives other logits: what an attack finds may not hold")
    alone = torch.cat([artefact.model(image[None]) for image in images])
    error, largest = float((first - alone).abs().max()), max(float(first.abs().max()), 1e-30)
    if error > _ROUNDING * largest:
        text = f"with other images beside it, an image's logits are off by {error:.2g}: they must depend on it alone"
        return Finding(name, "bad", text)
    return Finding(name, "good", "the artefact's answer depends on nothing but the image")


def replays(natural: Test, tests: Sequence[Test]) -> list[Finding]:
    """Check that images that fool the twin also fool the artefact: otherwise its robust accuracy is too high."""
    findings = []
    for test in _of(tests, "replayed"):
        fooled, missed, n = test["torch"]["images"].count("0"), _right_in_artefact_only(test), test["deployed"]["n"]
        text = f"{test['name']}: of {fooled:,} images that the twin gets wrong the artefact gets {missed:,} right"
        verdict = graded(missed / n, 0.01, 0.05) if missed > 1 else "good"
        advice = ": its robust accuracy may be too high; give a --twin of the very same weights"
        findings.append(Finding("replay", verdict, text if verdict == "good" else text + advice))
    if findings and (only := _right_in_artefact_only(natural)):
        n = natural["deployed"]["n"]
        text = f"{only:,} of {n:,} clean images are right in the artefact only: gradients had nothing to attack there"
        findings.append(Finding("replay", graded(only / n, 0.01, 0.05), text))
    return findings


def queries(tests: Sequence[Test]) -> list[Finding]:
    """Check whether queries fool the artefact on images that the replayed adversarials do not."""
    replayed = [test["deployed"]["images"] for test in _of(tests, "replayed")]
    if not replayed:
        return []
    robust = [set(bits) == {"1"} for bits in zip(*replayed, strict=True)]
    findings = []
    for test in _of(tests, "queries"):
        bits = test["deployed"]["images"]
        broken = sum(was_robust and bit == "0" for was_robust, bit in zip(robust, bits, strict=True))
        text = f"{test['name']} fools {broken:,} of {sum(robust):,} images that the replayed adversarials leave right"
        weak = broken > 1 and broken > 0.05 * sum(robust)
        advice = ": the attacks on the twin are too weak, the union counts; add --attack autoattack" if weak else ""
        findings.append(Finding("black box", "look" if weak else "good", text + advice))
    return findings


def _of(tests: Sequence[Test], how: str) -> list[Test]:
    return [test for test in tests if test["how"] == how]


def _right_in_artefact_only(test: Test) -> int:
    pairs = zip(test["torch"]["images"], test["deployed"]["images"], strict=True)
    return sum(pair == ("0", "1") for pair in pairs)


def _is_number(result: Test, key: str) -> bool:
    return isinstance(result.get(key), (int, float)) and not isinstance(result[key], bool)
