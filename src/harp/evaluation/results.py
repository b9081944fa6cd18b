"""The results of a network: every number is measured once, written to a file of its own, and can be resumed.

    FOLDER/<kind>-<name>-<hash>.json          the result, and all that it depends on
    FOLDER/<kind>-<name>-<hash>.state.pt      the state of an attack that was interrupted
    FOLDER/<kind>-<name>-<hash>/*.safetensors the adversarial images, if they are stored

The hash covers the network's weights, the data, the attack, the number of images and the seed, so another network or
other settings never get an old result. `harp run` writes its results this way to the folders of its stages, and
`harp evaluate` reads them from there (`Subject.measured`), and the other way round.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harp.attacks import Apgd, Ball, Fmn, check_number
from harp.data.decodable import readable
from harp.errors import CheckpointError, DataError, Interrupted, ModelError
from harp.evaluation import accuracy, consistency, gradient_masking
from harp.evaluation.accuracy import Subject
from harp.evaluation.corruptions import Corruptions, measure_all
from harp.evaluation.predict import answer, as_input, example_of, predicted_in_batches
from harp.evaluation.runner import BATCH, forget, seeded
from harp.evaluation.score import score, subset
from harp.models.weights import fingerprint
from harp.system import files
from harp.system.distributed.peers import Alone
from harp.system.interrupt import Stop, insist
from harp.system.progress import Quiet
from harp.system.seeds import derive

CURVE = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""The radii of a security curve, as multiples of the radius that the network was trained for."""

_CHECKED = 64  # images for the checks of the model itself
_SHOWN = 24  # changed predictions that are listed
_PICTURES = 8  # adversarial images that are kept for a report


class Audit:
    """A subject's numbers on the test set.

    Arguments:
        folder: for the files; without one nothing is written.
        examples: the number of images, drawn by the seed; default all.
        store: keep all adversarial images too.
        witness: another network, which classifies the same adversarial images; its answers are kept beside the
            subject's.
        peers: the processes that share the work: all must call the same methods, and all get the results; the first
            one writes them.
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
        self.chosen = subset(len(test), examples, seed)
        bar = self.display.counting("test images", len(self.chosen))
        self.test, positions = readable(test.select(self.chosen), self.display.count, bar=bar)
        self.chosen = self.chosen[positions]
        self.like = example_of(subject.model, self.test.images)
        self.network = fingerprint(subject.model)
        # All images are asked for by None or by their number: files of either name hold the same result.
        all_images = [None, len(test)] if examples is None or examples >= len(test) else []
        data, by_witness = subject.data.fingerprint(), "" if witness is None else f"/{fingerprint(witness)}"
        counts = dict.fromkeys([examples, *all_images])
        self.identities = [f"{self.network}/{data}/{count}/{seed}/{batch}{by_witness}" for count in counts]

    def natural(self) -> dict[str, Any]:
        """Accuracy on the images as they are."""
        result = self.under("natural", None)
        wrong = torch.tensor([index for index, bit in enumerate(result["images"]) if bit == "0"], dtype=torch.long)
        classes = predicted_in_batches(self.subject.model, self.test.select(wrong).images, self.batch)
        if count := int((classes < 0).sum()):
            raise ModelError(f"the logits of {count} of {result['n']} images are not finite: nothing can be measured")
        return result

    def under(self, name: str, attack: Any) -> dict[str, Any]:
        """Accuracy under an attack, with the counts of each part of an ensemble, and a few examples."""
        return self._accuracy("accuracy", name, attack, 0 if attack is None else _PICTURES)

    def _accuracy(self, kind: str, name: str, attack: Any, pictures: int) -> dict[str, Any]:
        """Accuracy under an attack, from a file if it was measured before."""

        def measure() -> dict[str, Any]:
            with self.display.counting(f"test {name}", len(self.test)):
                result, outcome = accuracy.measure(
                    self.subject.model,
                    self.subject.data,
                    name,
                    attack,
                    examples=self.examples,
                    seed=self.seed,
                    batch=self.batch,
                    path=self._path(kind, name, repr(attack), ".state.pt"),
                    store=self._path(kind, name, repr(attack), "") if self.store else None,
                    pictures=pictures,
                    witness=self.witness,
                    progress=self.display.count,
                    stop=self.stop,
                    peers=self.peers,
                )
            if len(outcome.examples.get("index", ())):
                self._cached("examples", name, repr(attack), lambda: self._pictures(name, attack, outcome.examples))
            if self.witness is not None:
                result["witness"] = {"network": fingerprint(self.witness), "images": _bits(outcome.witnessed)}
            if outcome.parts:
                result["parts"] = [{**part, "seconds": round(part["seconds"], 2)} for part in outcome.parts]
            if not torch.equal(outcome.right, outcome.during):
                result["during"] = float(outcome.during.float().mean())
            return {**result, "images": _bits(outcome.right), "seconds": round(outcome.seconds, 2)}

        return self._cached(kind, name, repr(attack), measure)

    def worst(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Accuracy under all the attacks together: an image counts if none of them fooled it."""
        flags = [[bit == "1" for bit in result["images"]] for result in results]
        right = [all(of_image) for of_image in zip(*flags, strict=True)]
        facts = {"kind": "accuracy", "name": "worst case", "of": [result["name"] for result in results]}
        like = {**results[0], "attack": results[-1]["attack"]}
        return self.counted(torch.tensor(right), like) | facts

    def counted(self, right: Tensor, like: Mapping[str, Any]) -> dict[str, Any]:
        """The accuracy by flags of which images are right; the other fields come from the result `like`."""
        data = self.subject.data
        scored = score(right, self.test.labels, None, classes=data.num_classes, batch=self.batch, seed=self.seed)
        facts = {"name": like["name"], "attack": like["attack"], "network": self.network, "images": _bits(right)}
        result = {**like, **scored.summary(data.balanced), **facts}
        return {key: item for key, item in result.items() if key not in ("parts", "during", "seconds", "witness")}

    def curve(self, ball: Ball) -> dict[str, Any]:
        """Accuracy over the radius of the ball; each radius has an attack of its own."""
        attacks = attacks_of_curve(ball)
        results = [(0.0, self.natural())]
        for attack in attacks:
            result = self._accuracy("radius", f"{attack.name}-{attack.epsilon:.4g}", attack, 0)
            results.append((attack.epsilon, result))
        points = [
            {"epsilon": epsilon, **{key: result[key] for key in ("value", "low", "high", "n")}}
            for epsilon, result in results
        ]
        curve = {"attack": attacks[0].name, "norm": ball.norm, "points": points}
        return self._cached("curve", attacks[0].name, repr(ball), lambda: curve)

    def distances(self, norm: str) -> dict[str, Any]:
        """The distance to the nearest adversarial image that a minimum-norm attack finds."""
        attack = Fmn(norm=norm)

        def measure() -> dict[str, Any]:
            values: dict[int, Tensor] = {}
            with self.display.counting(f"test {attack.name}", len(self.test)):
                for start in range(0, len(self.test), self.batch)[self.peers.rank :: self.peers.world]:
                    x = as_input(self.test.images[start : start + self.batch], self.like)
                    y = self.test.labels[start : start + self.batch].to(self.like.device)
                    with seeded(derive(self.seed, "distances", start), x.device):
                        values[start] = attack.distances(self.subject.model, x, y).cpu()
                    self._count(start + len(y), len(self.test), attack.name)
                self.peers.meet(self._stop_if_asked)
            parts = {start: part for process in self.peers.gather(values) for start, part in process.items()}
            distances = torch.cat([parts[start] for start in sorted(parts)])
            listed = [None if value == float("inf") else value for value in distances.tolist()]
            return {"attack": attack.name, "norm": norm, "median": float(distances.median()), "values": listed}

        return self._cached("distances", attack.name, repr(attack), measure)

    def corruptions(self, corrupted: Corruptions) -> dict[str, Any]:
        """Accuracy on published files of corrupted test images, such as those of CIFAR-10-C."""
        if corrupted.missing:
            missing = ", ".join(corrupted.missing)
            self.display.note(f"{corrupted.name} has no {missing}: published means are over these, too")

        def measure() -> dict[str, Any]:
            model, batch, count = self.subject.model, self.batch, self._count
            with self.display.counting("test corruptions", len(corrupted.parts)):
                return measure_all(model, corrupted, self.examples, seed=self.seed, batch=batch, progress=count)

        return self._cached("corruptions", "files", corrupted.digest(), measure, alone=True)

    def flips(self, dense: nn.Module) -> dict[str, Any]:
        """The predictions that pruning has changed."""

        def measure() -> dict[str, Any]:
            models, y = (dense, self.subject.model), self.test.labels.cpu()
            before, after = (predicted_in_batches(model, self.test.images, self.batch) for model in models)
            right_before, right_after = before == y, after == y
            changed = (before != after).nonzero().flatten()
            return {
                "both_right": int((right_before & right_after).sum()),
                "lost": int((right_before & ~right_after).sum()),
                "won": int((~right_before & right_after).sum()),
                "both_wrong": int((~right_before & ~right_after).sum()),
                "changed": len(changed),
                "examples": [
                    {"index": int(self.chosen[i]), "label": int(y[i]), "dense": int(before[i]), "pruned": int(after[i])}
                    for i in changed[:_SHOWN].tolist()
                ],
            }

        return self._cached("flips", "dense", fingerprint(dense), measure, alone=True)

    def agreement(self, other: nn.Module) -> dict[str, Any]:
        """How far the logits of another network are from the subject's, on clean images."""

        def measure() -> dict[str, Any]:
            with self.display.counting("agreement", 2 * len(self.test)):
                own, others = self._logits(self.subject.model, 0), self._logits(other, len(self.test))
            if own.shape != others.shape:
                raise ModelError(f"{own.shape[1]} classes can't be compared with {others.shape[1]}")
            difference, largest = float((own - others).abs().max()), float(others.abs().max())
            return {
                "agree": int((own.argmax(1) == others.argmax(1)).sum()),
                "right": int((own.argmax(1) == self.test.labels.cpu()).sum()),
                "right_other": int((others.argmax(1) == self.test.labels.cpu()).sum()),
                "difference": difference,  # the largest of any logit
                "relative": difference / largest if largest else difference,  # to the largest logit
            }

        return self._cached("agreement", "answers", fingerprint(other), measure, alone=True)

    def checks(self, ball: Ball, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Signs of false robustness: in the model, and in the numbers measured so far."""

        def measure() -> dict[str, Any]:
            sample = self.test.select(torch.arange(min(_CHECKED, len(self.test))))
            findings = [
                *gradient_masking.inspect(self.subject.model, sample.images[:], sample.labels, ball, seed=self.seed),
                *consistency.review(results),
            ]
            return {"findings": [asdict(finding) for finding in findings]}

        values = "/".join(f"{result['name']}={result.get('value')}" for result in results if "name" in result)
        return self._cached("checks", "robustness", f"{ball!r}/{values}", measure, alone=True)

    def _cached(
        self, kind: str, name: str, conditions: str, measure: Callable[[], dict[str, Any]], *, alone: bool = False
    ) -> dict[str, Any]:
        """The result in the file of this measurement; if there is none, measure now and write the file.

        `alone`: the first process measures and the others wait, for work that is too short to share.
        """
        result = self.peers.first(self._read_saved(kind, name, conditions))
        if result is None:
            measured = measure() if self.peers.rank == 0 or not alone else {}
            if alone:
                self.peers.meet(self._stop_if_asked)
                measured = self.peers.first(measured)
            data = self.subject.data
            origin = {"kind": kind, "classes": list(data.classes), "data": data.name, "source": data.source}
            result = {**origin, "network": self.network, "seed": self.seed, "n": len(self.test), **measured}
            self._write(kind, name, conditions, result)
        # Also for an old result: the process may have been killed after it wrote it.
        if (path := self._path(kind, name, conditions, ".state.pt")) is not None and self.peers.rank == 0:
            forget(path)
        return result

    def _path(self, kind: str, name: str, conditions: str, suffix: str) -> Path | None:
        """The file of a measurement that has this suffix; None if nothing is written."""
        return None if self.folder is None else self.folder / (self._names(kind, name, conditions)[0] + suffix)

    def _names(self, kind: str, name: str, conditions: str) -> list[str]:
        """The file names, without suffix, that a result may have; new files get the first one."""
        words = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in name)
        texts = (f"{identity}/{kind}/{name}/{conditions}" for identity in self.identities)
        return [f"{kind}-{words}-{hashlib.sha256(text.encode()).hexdigest()[:10]}" for text in texts]

    def _read_saved(self, kind: str, name: str, conditions: str) -> dict[str, Any] | None:
        """The result of an earlier measurement. One from another folder is copied here, with its pictures."""
        names = self._names(kind, name, conditions)
        elsewhere = () if self.store else self.subject.measured  # other folders may lack the images to store
        folders = (*([] if self.folder is None else [self.folder]), *elsewhere)
        path = next((file for where in folders for stem in names if (file := where / f"{stem}.json").is_file()), None)
        if path is None:
            return None
        try:
            saved = files.read_json(path)
        except CheckpointError as error:
            raise DataError(f"{path} is not the JSON it should be: delete it to measure again") from error
        if path.parent != self.folder:
            if kind == "accuracy":
                self.display.note(f"{name}: measured before, taken from {path}")
                self._read_saved("examples", name, conditions)
            self._write(kind, name, conditions, saved)
        return saved

    def _write(self, kind: str, name: str, conditions: str, result: dict[str, Any]) -> None:
        path = self._path(kind, name, conditions, ".json")
        if path is not None and self.peers.rank == 0:
            insist(lambda: files.write_json(path, result), stop=self.stop)

    def _count(self, done: float, total: int, text: str = "") -> None:
        """Show the progress, and stop if a stop was requested."""
        self.display.count(done, total, text)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self.stop.signal is not None:
            raise Interrupted("stopped; what was measured is kept", self.stop.signal)

    def _pictures(self, name: str, attack: Any, examples: Mapping[str, Tensor]) -> dict[str, Any]:
        """A few images before and after an attack, as bytes."""
        items = [
            {
                "index": int(self.chosen[examples["index"][row]]),
                **{key: int(examples[key][row]) for key in ("label", "before", "after")},
                **{key: _bytes(examples[key][row]) for key in ("image", "attacked")},
            }
            for row in range(len(examples["index"]))
        ]
        facts = {"attack": name, "epsilon": getattr(attack, "epsilon", None)}
        return {**facts, "shape": list(examples["image"].shape[1:]), "items": items}

    def _logits(self, model: nn.Module, done: int) -> Tensor:
        """The logits of all images; the display has counted `done` images before."""
        like, batches = example_of(model, self.test.images), []
        for start in range(0, len(self.test), self.batch):
            batches.append(answer(model, as_input(self.test.images[start : start + self.batch], like)).double().cpu())
            self._count(done + start + len(batches[-1]), 2 * len(self.test), "agreement")
        return torch.cat(batches)


def attacks_of_curve(ball: Ball) -> list[Apgd]:
    """The attacks of a security curve around the ball that a network was trained for."""
    radii = [scale * ball.epsilon for scale in CURVE]
    return [Apgd(radius, ball.norm, steps=50) for radius in radii if ball.norm != "linf" or radius < 1]


def _bits(right: Tensor) -> str:
    return "".join("1" if bit else "0" for bit in right.tolist())


def _bytes(image: Tensor) -> str:
    return base64.b64encode((image * 255).round().to(torch.uint8).contiguous().numpy().tobytes()).decode()
