"""The trial of an artefact: its accuracy, and what is left of it under attack.

Attacks by gradients are made on the twin. What they find is replayed on the artefact, image by image. Attacks by
queries (Square) are made on the artefact itself. An image is robust as deployed if the artefact gets it right as it is,
on everything that was found on the twin, and after all queries.

    FOLDER/deployed-<file>-<hash>.json   everything that one command found
    FOLDER/artefact/, FOLDER/twin/       every number in a file of its own, taken up where it was interrupted
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harp import contradictions, files
from harp.answers import as_input
from harp.assess import Subject
from harp.attacks import Apgd, Ball, Square
from harp.audit import CURVE, Audit
from harp.deployed import verdicts
from harp.deployed.twin import Subjects
from harp.display import Quiet
from harp.doctor import Finding
from harp.errors import ModelError
from harp.keeper import Stop

KIND = "deployed"
_CHECKED = 16  # images that the artefact is asked about twice
_LEFT_OUT = ("images", "witness", "classes")  # of the numbers in the one file


class Trial:
    """The numbers of an artefact and its twin on the test set.

    Arguments:
        folder: takes the files; without one nothing is kept.
        examples: images, drawn by the seed; default all.
        store: keep all adversarial images too.
    """

    def __init__(
        self,
        subjects: Subjects,
        folder: Path | None,
        *,
        examples: int | None = None,
        seed: int = 0,
        batch: int = 256,
        store: bool = False,
        display: Quiet | None = None,
        stop: Stop | None = None,
    ) -> None:
        self.subjects, self.folder = subjects, folder
        artefact, twin, source = subjects.artefact, subjects.twin, subjects.data

        def audit(model: torch.nn.Module, name: str, witness: torch.nn.Module | None = None) -> Audit:
            return Audit(
                Subject(model, source, subjects.threat),
                None if folder is None else folder / name,
                examples=examples,
                seed=seed,
                batch=batch,
                store=store,
                witness=witness,
                display=display,
                stop=stop,
            )

        self.direct = audit(artefact.model, "artefact")
        self.white = None if twin is None else audit(twin.model, "twin", artefact.model)

    def natural(self) -> dict[str, Any]:
        """Accuracy on the images as they are."""
        inside = None if self.white is None else self.white.natural()
        return {"name": "natural", "how": "images", "torch": inside, "deployed": self.direct.natural()}

    def under(self, name: str, attack: Any) -> dict[str, Any]:
        """Accuracy under an attack: of the artefact itself if that needs answers only, else by replay."""
        if is_black_box(attack):
            return {"name": name, "how": "queries", "torch": None, "deployed": self.direct.under(name, attack)}
        found = self._twin().under(name, attack)
        return {"name": name, "how": "replayed", "torch": found, "deployed": self._replayed(found)}

    def worst(self, tests: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Accuracy under all of it together: the robust accuracy, of the twin and as deployed."""
        white = [test["torch"] for test in tests if test["torch"] is not None]
        inside = self._twin().worst(white) if len(white) > 1 else None
        whole = self.direct.worst([test["deployed"] for test in tests])
        return {"name": whole["name"], "how": "union", "torch": inside, "deployed": whole}

    def curve(self, ball: Ball) -> list[dict[str, Any]]:
        """Accuracy over the radius of the ball: each radius is attacked for itself on the twin, and replayed."""
        natural = self.natural()
        points = [{"epsilon": 0.0, "torch": _point(natural["torch"]), "deployed": _point(natural["deployed"])}]
        for scale in CURVE:
            attack = Apgd(scale * ball.epsilon, ball.norm, steps=50)
            found = self._twin().under(f"{attack.name}-{attack.epsilon:.4g}", attack)
            both = {"torch": _point(found), "deployed": _point(self._replayed(found))}
            points.append({"epsilon": attack.epsilon, **both})
        return points

    def agreement(self) -> list[tuple[str, bool, dict[str, Any]]]:
        """How far the artefact's answers are from those of networks of torch: which, if it is the twin, how far."""
        pairs = [(self.subjects.twin, True), (self.subjects.original, False)]
        return [(each.words, own, self.direct.agreement(each.model)) for each, own in pairs if each is not None]

    def checks(self, ball: Ball, tests: Sequence[dict[str, Any]]) -> list[Finding]:
        """Whether the artefact is what it seems, and the twin's robustness real."""
        artefact, origin = self.subjects.artefact, self.subjects.origin
        images = as_input(self.direct.test.images[:_CHECKED], self.direct.like)
        natural = next(test for test in tests if test["name"] == "natural")
        found = [
            *verdicts.integrity(artefact, origin),
            *verdicts.stated(natural["deployed"], origin),
            *(verdicts.agreement(how, words, exact=own) for words, own, how in self.agreement()),
            verdicts.determinism(artefact, images),
            *verdicts.replays(natural, tests),
            *verdicts.queries(tests),
            *contradictions.review([test["deployed"] for test in tests]),
        ]
        if self.white is not None:
            inside = self.white.checks(ball, [test["torch"] for test in tests if test["torch"] is not None])
            found += [Finding(f"twin: {f['check']}", f["verdict"], f["text"]) for f in inside["findings"]]
        return found

    def summary(
        self, tests: Sequence[dict[str, Any]], findings: Sequence[Finding], ball: Ball, **more: Any
    ) -> dict[str, Any]:
        """All that was found, with all that it depends on; it is written into the folder."""
        artefact, twin = self.subjects.artefact, self.subjects.twin
        first = tests[0]["deployed"]
        found = {
            "kind": KIND,
            "artefact": artefact.facts(),
            "twin": None if twin is None else {"words": twin.words, "network": self._twin().network},
            "threat": {"epsilon": ball.epsilon, "norm": ball.norm},
            **{key: first[key] for key in ("data", "source", "classes", "seed", "n", "batch", "measure", "versions")},
            "agreement": [
                {"with": words, "twin": own, **{key: how[key] for key in ("agree", "n", "difference", "relative")}}
                for words, own, how in self.agreement()
            ],
            "tests": [{**test, "torch": _short(test["torch"]), "deployed": _short(test["deployed"])} for test in tests],
            "checks": [{"check": f.check, "verdict": f.verdict, "text": f.text} for f in findings],
            **more,
        }
        if self.folder is not None:
            asked = [(test["name"], test["deployed"]["attack"]) for test in tests]
            inside = None if self.white is None else self.white.identity
            told = f"{self.direct.identity}/{inside}/{asked}/{sorted(more)}/{bool(findings)}"
            digest = hashlib.sha256(told.encode()).hexdigest()[:10]
            files.write_json(self.folder / f"{KIND}-{artefact.path.name}-{digest}.json", found)
        return found

    def _replayed(self, found: dict[str, Any]) -> dict[str, Any]:
        """The artefact's number by its answers about what was found on the twin."""
        right = torch.tensor([bit == "1" for bit in found["witness"]["images"]])
        return self.direct.counted(right, found)

    def _twin(self) -> Audit:
        if self.white is None:
            raise ModelError(f"{self.subjects.artefact.path.name} has no twin: only attacks by queries can be run")
        return self.white


def is_black_box(attack: Any) -> bool:
    """Whether an attack needs nothing but answers."""
    return isinstance(attack, Square)


def _short(found: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if found is None else {key: value for key, value in found.items() if key not in _LEFT_OUT}


def _point(found: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if found is None else {key: found[key] for key in ("value", "low", "high", "n")}
