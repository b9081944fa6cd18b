"""The audit of a network: every number in a file of its own, measured once, and taken up where it was interrupted.

    FOLDER/<kind>-<name>-<hash>.json          what was found, and all it depends on
    FOLDER/<kind>-<name>-<hash>.state.pt      an attack that was interrupted
    FOLDER/<kind>-<name>-<hash>/*.safetensors the adversarial images, where they are wanted

The hash is that of the network's weights, the data, the attack, the number of images and the seed: another network or
another question never gets an old answer.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp import assess, contradictions, corruptions, evaluate, files, suspicion
from harp.answers import answer, as_input, example_of, predicted
from harp.assault import BATCH, Outcome, forget, seeded
from harp.assess import Subject
from harp.attacks import Apgd, Ball, Fmn, check_number
from harp.checkpoint import fingerprint
from harp.display import Quiet
from harp.errors import DataError, Interrupted, ModelError
from harp.keeper import Stop, insist
from harp.processes.peers import Alone
from harp.readable import readable
from harp.seeds import derive

CURVE = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""The radii of a security curve, as multiples of the one that the network was made for."""

_CHECKED = 64  # images for the checks of the model itself
_SHOWN = 24  # flipped images that are listed
_PICTURES = 8


class Audit:
    """A subject's numbers on the test set.

    Arguments:
        folder: takes the files; without one nothing is kept.
        examples: images, drawn by the seed; default all.
        store: keep all adversarial images too.
        witness: another network, which is shown what the attacks find; its answers are kept beside the subject's.
        peers: the processes that share the work: all must ask the same questions, and all get the answers; the first
            one writes them down.
    """

    def __init__(
        self,
        subject: Subject,
        folder: Path | None,
        *,
        examples: int | None = None,
        seed: int = 0,
        batch: int = BATCH,
        store: bool = False,
        witness: nn.Module | None = None,
        display: Quiet | None = None,
        stop: Stop | None = None,
        peers: Alone | None = None,
    ) -> None:
        check_number("batch", batch, whole=True, least=1)
        self.subject, self.folder, self.store, self.witness = subject, folder, store, witness
        self.examples, self.seed, self.batch = examples, seed, batch
        self.display, self.stop, self.peers = display or Quiet(), stop or Stop(), peers or Alone()
        self.peers.listen(self.stop)
        test = subject.data.test
        self.chosen = evaluate.subset(len(test), examples, seed)
        bar = self.display.counting("test images", len(self.chosen))
        self.test, positions = readable(test.select(self.chosen), self.display.count, bar=bar)
        self.chosen = self.chosen[positions]
        self.like = example_of(subject.model, self.test.images)
        self.network = fingerprint(subject.model)
        self.identity = f"{self.network}/{subject.data.fingerprint()}/{examples}/{seed}/{batch}"
        if witness is not None:
            self.identity += f"/{fingerprint(witness)}"

    def natural(self) -> dict[str, Any]:
        """Accuracy on the images as they are."""
        found = self.under("natural", None)
        wrong = torch.tensor([index for index, bit in enumerate(found["images"]) if bit == "0"], dtype=torch.long)
        endless = int((self._predict(self.subject.model, self.test.select(wrong).images) < 0).sum())
        if endless:
            raise ModelError(f"the logits of {endless} of {found['n']} images are not finite: nothing can be measured")
        return found

    def under(self, name: str, attack: Any) -> dict[str, Any]:
        """Accuracy under an attack, with what each part of an ensemble did, and a few examples."""
        return self._attacked("accuracy", name, attack, 0 if attack is None else _PICTURES)

    def _attacked(self, kind: str, name: str, attack: Any, pictures: int) -> dict[str, Any]:
        def measure(stem: Path | None) -> dict[str, Any]:
            with self.display.counting(f"test {name}", len(self.test)):
                found, outcome = assess.measure(
                    self.subject.model,
                    self.subject.data,
                    name,
                    attack,
                    examples=self.examples,
                    seed=self.seed,
                    batch=self.batch,
                    path=None if stem is None else _state(stem),
                    store=stem if self.store else None,
                    pictures=pictures,
                    witness=self.witness,
                    progress=self.display.count,
                    stop=self.stop,
                    peers=self.peers,
                )
            if len(outcome.examples.get("index", ())):
                self._once("examples", name, repr(attack), lambda _: self._pictures(name, attack, outcome.examples))
            if self.witness is not None:
                found["witness"] = {"network": fingerprint(self.witness), "images": _bits(outcome.witnessed)}
            return found | _circumstances(outcome)

        return self._once(kind, name, repr(attack), measure)

    def worst(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Accuracy under all the attacks together: an image counts if none of them fooled it."""
        held = [all(bits) for bits in zip(*([bit == "1" for bit in found["images"]] for found in results), strict=True)]
        facts = {"kind": "accuracy", "name": "worst case", "of": [found["name"] for found in results]}
        last = {**results[0], "attack": results[-1]["attack"]}
        return self.counted(torch.tensor(held), last) | facts

    def counted(self, right: Tensor, like: Mapping[str, Any]) -> dict[str, Any]:
        """The accuracy by which of the images are right, measured otherwise like another number."""
        classes, balanced = self.subject.data.num_classes, self.subject.data.balanced
        score = evaluate.score(right, self.test.labels, None, classes=classes, batch=self.batch, seed=self.seed)
        low, high = score.interval(balanced=balanced)
        value = score.balanced_accuracy if balanced else score.accuracy
        facts = {"name": like["name"], "attack": like["attack"], "network": self.network}
        found = {**like, **score.as_dict(), **facts, "value": value, "low": low, "high": high, "images": _bits(right)}
        return {key: item for key, item in found.items() if key not in ("parts", "during", "seconds", "witness")}

    def curve(self, ball: Ball) -> dict[str, Any]:
        """Accuracy over the radius of the ball; each radius is attacked for itself."""
        names = [(scale * ball.epsilon, Apgd(scale * ball.epsilon, ball.norm, steps=50)) for scale in CURVE]
        natural = self.natural()
        points = [{"epsilon": 0.0, **{key: natural[key] for key in ("value", "low", "high", "n")}}]
        for epsilon, attack in names:
            found = self._attacked("radius", f"{attack.name}-{epsilon:.4g}", attack, 0)
            points.append({"epsilon": epsilon, **{key: found[key] for key in ("value", "low", "high", "n")}})
        described = {"attack": names[0][1].name, "norm": ball.norm, "points": points}
        return self._once("curve", names[0][1].name, repr(ball), lambda stem: described)

    def distances(self, norm: str) -> dict[str, Any]:
        """How far the nearest adversarial image is that a minimum-norm attack finds."""
        attack = Fmn(norm=norm)

        def measure(stem: Path | None) -> dict[str, Any]:
            values: dict[int, Tensor] = {}
            with self.display.counting(f"test {attack.name}", len(self.test)):
                for start in range(0, len(self.test), self.batch)[self.peers.rank :: self.peers.world]:
                    x = as_input(self.test.images[start : start + self.batch], self.like)
                    y = self.test.labels[start : start + self.batch].to(self.like.device)
                    with seeded(derive(self.seed, "distances", start), x.device):
                        values[start] = attack.distances(self.subject.model, x, y).cpu()
                    self._count(start + len(y), len(self.test), attack.name)
                self.peers.meet(self._stop_if_asked)
            parts = {start: part for each in self.peers.gather(values) for start, part in each.items()}
            found = torch.cat([parts[start] for start in sorted(parts)])
            listed = [None if value == float("inf") else value for value in found.tolist()]
            return {"attack": attack.name, "norm": norm, "median": float(found.median()), "values": listed}

        return self._once("distances", attack.name, repr(attack), measure)

    def corruptions(self) -> dict[str, Any]:
        """Accuracy on corrupted images."""

        def measure(stem: Path | None) -> dict[str, Any]:
            with self.display.counting("test corruptions", 1):
                return corruptions.measure(
                    self.subject.model,
                    self.test.images,
                    self.test.labels,
                    seed=self.seed,
                    batch=self.batch,
                    progress=self._count,
                )

        return self._once("corruptions", "all", "", self._by_one(measure))

    def flips(self, dense: nn.Module) -> dict[str, Any]:
        """Which predictions pruning has changed."""

        def measure(stem: Path | None) -> dict[str, Any]:
            before, after, y = self._predict(dense), self._predict(self.subject.model), self.test.labels.cpu()
            was, is_ = before == y, after == y
            changed = (before != after).nonzero().flatten()
            listed = changed[:_SHOWN].tolist()
            return {
                "both_right": int((was & is_).sum()),
                "lost": int((was & ~is_).sum()),
                "won": int((~was & is_).sum()),
                "both_wrong": int((~was & ~is_).sum()),
                "changed": len(changed),
                "examples": [
                    {"index": int(self.chosen[i]), "label": int(y[i]), "dense": int(before[i]), "pruned": int(after[i])}
                    for i in listed
                ],
            }

        return self._once("flips", "dense", fingerprint(dense), self._by_one(measure))

    def agreement(self, other: nn.Module) -> dict[str, Any]:
        """How far the answers of another network are from these, on the images as they are."""

        def measure(stem: Path | None) -> dict[str, Any]:
            with self.display.counting("agreement", 2 * len(self.test)):
                mine, theirs = self._answers(self.subject.model, 0), self._answers(other, len(self.test))
            if mine.shape != theirs.shape:
                raise ModelError(f"{mine.shape[1]} classes can't be compared with {theirs.shape[1]}")
            off, reach = float((mine - theirs).abs().max()), float(theirs.abs().max())
            return {
                "agree": int((mine.argmax(1) == theirs.argmax(1)).sum()),
                "right": int((mine.argmax(1) == self.test.labels.cpu()).sum()),
                "right_other": int((theirs.argmax(1) == self.test.labels.cpu()).sum()),
                "difference": off,  # the largest of any logit
                "relative": off / reach if reach else off,  # to the largest logit
            }

        return self._once("agreement", "answers", fingerprint(other), self._by_one(measure))

    def checks(self, ball: Ball, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Signs of false robustness: in the model, and in the numbers measured so far."""

        def measure(stem: Path | None) -> dict[str, Any]:
            some = self.test.select(torch.arange(min(_CHECKED, len(self.test))))
            images = as_input(some.images[:], self.like)
            labels = some.labels.to(self.like.device)
            findings = [
                *suspicion.inspect(self.subject.model, images, labels, ball, seed=self.seed),
                *contradictions.review(results),
            ]
            return {"findings": [{"check": f.check, "verdict": f.verdict, "text": f.text} for f in findings]}

        shown = "/".join(f"{found['name']}={found.get('value')}" for found in results if "name" in found)
        return self._once("checks", "robustness", f"{ball!r}/{shown}", self._by_one(measure))

    def _once(
        self, kind: str, name: str, conditions: str, measure: Callable[[Path | None], dict[str, Any]]
    ) -> dict[str, Any]:
        """What the file says, or what is measured now and put there."""
        digest = hashlib.sha256(f"{self.identity}/{kind}/{name}/{conditions}".encode()).hexdigest()[:10]
        words = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in name)
        stem = None if self.folder is None else self.folder / f"{kind}-{words}-{digest}"
        path = None if stem is None else stem.with_name(f"{stem.name}.json")
        known = self.peers.first(_read(path) if path is not None and path.exists() else None)
        if known is not None:
            self._tidy(stem)  # a kill may have come between the result and this
            return known
        source = self.subject.data
        facts = {
            "network": self.network,
            "data": source.name,
            "source": source.source,
            "seed": self.seed,
            "n": len(self.test),
        }
        found = {"kind": kind, "classes": list(source.classes), **facts, **measure(stem)}
        if path is not None and self.peers.rank == 0:
            insist(lambda: files.write_json(path, found), stop=self.stop)
        self._tidy(stem)
        return found

    def _tidy(self, stem: Path | None) -> None:
        """Remove the state of an attack, whose result is written."""
        if stem is not None and self.peers.rank == 0:
            forget(_state(stem))

    def _by_one(self, measure: Callable[[Path | None], dict[str, Any]]) -> Callable[[Path | None], dict[str, Any]]:
        """What is too short to be shared is done by the first process, and the others wait."""

        def first(stem: Path | None) -> dict[str, Any]:
            found = measure(stem) if self.peers.rank == 0 else {}
            self.peers.meet(self._stop_if_asked)
            return self.peers.first(found)

        return first

    def _count(self, done: float, total: int, text: str = "") -> None:
        """Show how far it is, and stop if somebody asks for that."""
        self.display.count(done, total, text)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self.stop.signal is not None:
            raise Interrupted("stopped; what was measured is kept", self.stop.signal)

    def _pictures(self, name: str, attack: Any, examples: Mapping[str, Tensor]) -> dict[str, Any]:
        """A few images before and after an attack, as bytes."""
        items = [
            {
                "index": int(self.chosen[int(examples["index"][i])]),
                "label": int(examples["label"][i]),
                "before": int(examples["before"][i]),
                "after": int(examples["after"][i]),
                "image": _bytes(examples["image"][i]),
                "attacked": _bytes(examples["attacked"][i]),
            }
            for i in range(len(examples["index"]))
        ]
        facts = {"attack": name, "epsilon": getattr(attack, "epsilon", None)}
        return {**facts, "shape": list(examples["image"].shape[1:]), "items": items}

    def _answers(self, model: nn.Module, before: int) -> Tensor:
        """The logits of all images; `before` so many answers were counted already."""
        like, found = example_of(model, self.test.images), []
        for start in range(0, len(self.test), self.batch):
            found.append(answer(model, as_input(self.test.images[start : start + self.batch], like)).double().cpu())
            self._count(before + start + len(found[-1]), 2 * len(self.test), "agreement")
        return torch.cat(found)

    def _predict(self, model: nn.Module, images: Tensor | None = None) -> Tensor:
        images = self.test.images if images is None else images
        starts = range(0, len(images), self.batch)
        parts = [predicted(model, as_input(images[s : s + self.batch], self.like)).cpu() for s in starts]
        return torch.cat([torch.zeros(0, dtype=torch.long), *parts])


def _circumstances(outcome: Outcome) -> dict[str, Any]:
    """What is worth knowing beside the number."""
    found: dict[str, Any] = {"images": _bits(outcome.right), "seconds": round(outcome.seconds, 2)}
    if outcome.parts:
        found["parts"] = [{**part, "seconds": round(part["seconds"], 2)} for part in outcome.parts]
    if not torch.equal(outcome.right, outcome.during):
        found["during"] = float(outcome.during.float().mean())
    return found


def _state(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.state.pt")


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not the JSON it should be: delete it to measure again") from error
    return found


def _bits(right: Tensor) -> str:
    return "".join("1" if bit else "0" for bit in right.tolist())


def _bytes(image: Tensor) -> str:
    return base64.b64encode((image * 255).round().to(torch.uint8).contiguous().numpy().tobytes()).decode()
