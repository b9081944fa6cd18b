"""Whether an artefact is the network that it is taken for, and whether the numbers say what they seem to say."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harp.deployed.manifest import Origin
from harp.deployed.opening import Artefact
from harp.doctor import Finding, Verdict, graded

Test = Mapping[str, Any]

_OFF = 1e-3  # of the largest logit: more than rounding of the same weights


def integrity(artefact: Artefact, origin: Origin) -> list[Finding]:
    """Whether the file is the one that the manifest beside it describes."""
    if origin.unlisted:
        text = "the manifest beside the file does not list it: nothing that it says was taken for this network"
        return [Finding("integrity", "look", text)]
    told = origin.sha256_of(artefact.path.name)
    if told is None:
        return []
    if told == artefact.sha256:
        return [Finding("integrity", "good", "the file has the SHA-256 that its manifest gives it")]
    text = (
        f"the file's SHA-256 begins with {artefact.sha256[:12]}, the manifest's with {told[:12]}: it was changed since"
    )
    return [Finding("integrity", "bad", text)]


def stated(measured: Mapping[str, Any], origin: Origin) -> list[Finding]:
    """Whether the natural accuracy is the one that the run or the manifest states."""
    names = [each for each in origin.accuracies if each.get("name") == "natural" and _is_number(each.get("value"))]
    if not names or names[-1].get("data", measured["data"]) != measured["data"]:
        return []
    told = names[-1]
    low, high = (float(told[key]) if _is_number(told.get(key)) else float(told["value"]) for key in ("low", "high"))
    seen = f"natural accuracy {measured['value']:.1%} as deployed, {told['value']:.1%} was stated"
    if measured["high"] < low:
        return [
            Finding("stated accuracy", "bad", f"{seen}: this is not the network that was measured, or it is damaged")
        ]
    if measured["low"] > high:
        return [Finding("stated accuracy", "look", f"{seen}: this is not the network that was measured")]
    return [Finding("stated accuracy", "good", seen)]


def agreement(found: Mapping[str, Any], words: str, *, exact: bool) -> Finding:
    """Whether the artefact gives the answers of a network of torch; one with other roundings may differ a little."""
    n, lost = found["n"], found["n"] - found["agree"]
    seen = (
        f"{found['agree']:,} of {n:,} clean predictions are those of {words}, logits differ by at most "
        f"{found['difference']:.2g} ({found['relative']:.1g} of the largest)"
    )
    if not exact:
        verdict = graded(lost / n, 0.02, 0.1)
        more = "" if verdict == "good" else ": rounding should not cost as much; is the artefact of this network?"
        return Finding("agreement", verdict, seen + more)
    verdict = graded(lost / n, 0.002, 0.02)
    if verdict == "good" and found["relative"] > _OFF:
        verdict = "look"
    more = "" if verdict == "good" else ": the artefact does not compute what its twin computes"
    return Finding("agreement", verdict, seen + more)


def determinism(artefact: Artefact, images: torch.Tensor) -> Finding:
    """Whether the artefact gives an image the same answer again, and in another batch the same up to rounding."""
    first, again = artefact.model(images), artefact.model(images)
    if not torch.equal(first, again):
        text = "the same image gives other logits: what an attack finds may not hold"
        return Finding("artefact's answers", "bad", text)
    alone = torch.cat([artefact.model(image[None]) for image in images])
    off, reach = float((first - alone).abs().max()), max(float(first.abs().max()), 1e-30)
    if off > _OFF * reach:
        text = f"with other images beside it, an image's logits are off by {off:.2g}: they must depend on it alone"
        return Finding("artefact's answers", "bad", text)
    return Finding("artefact's answers", "good", "the artefact's answer depends on nothing but the image")


def replays(natural: Test, tests: Sequence[Test]) -> list[Finding]:
    """Whether what fools the twin fools the artefact: else its robust accuracy is too high by that much."""
    replayed = [test for test in tests if test["how"] == "replayed"]
    found = []
    for test in replayed:
        pairs = list(zip(test["torch"]["images"], test["deployed"]["images"], strict=True))
        fooled = sum(before == "0" for before, _ in pairs)
        missed = sum(before == "0" and after == "1" for before, after in pairs)
        seen = f"{test['name']}: of {fooled:,} images that the twin gets wrong the artefact gets {missed:,} right"
        verdict = graded(missed / len(pairs), 0.01, 0.05) if missed > 1 else "good"
        more = (
            "" if verdict == "good" else ": its robust accuracy may be too high; give a --twin of the very same weights"
        )
        found.append(Finding("replay", verdict, seen + more))
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
            found.append(Finding("replay", graded(only / n, 0.01, 0.05), text))
    return found


def queries(tests: Sequence[Test]) -> list[Finding]:
    """Whether queries to the artefact find what the replayed adversarials do not."""
    white = [test["deployed"]["images"] for test in tests if test["how"] == "replayed"]
    found = []
    for test in (test for test in tests if test["how"] == "queries" and white):
        held = [set(bits) == {"1"} for bits in zip(*white, strict=True)]
        broken = sum(left and bit == "0" for left, bit in zip(held, test["deployed"]["images"], strict=True))
        seen = f"{test['name']} fools {broken:,} of {sum(held):,} images that the replayed adversarials leave right"
        weak = broken > 1 and broken > 0.05 * sum(held)
        verdict: Verdict = "look" if weak else "good"
        more = ": the attacks on the twin are too weak, the union counts; add --attack autoattack" if weak else ""
        found.append(Finding("black box", verdict, seen + more))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
