"""The accuracy of an artefact, natural and under attack.

Attacks that need gradients run on the twin, and their adversarial images are replayed on the artefact one by one.
Attacks by queries (Square) run on the artefact itself. An image counts as robust if the artefact classifies it
correctly without an attack, on every adversarial image of the twin, and after all queries.

    FOLDER/deployed-<file>-<hash>.json   all results of one command
    FOLDER/artefact/, FOLDER/twin/       one file a result; an interrupted command continues from them
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from harp.attacks import Ball, Square
from harp.deploy.exported_eval import checks
from harp.deploy.exported_eval.twin import Setup
from harp.errors import ModelError
from harp.evaluation import consistency
from harp.evaluation.accuracy import Subject
from harp.evaluation.corruptions import Corruptions
from harp.evaluation.model_checks import Finding
from harp.evaluation.predict import as_input
from harp.evaluation.results import Audit, attacks_of_curve
from harp.system import files

KIND = "deployed"
_CHECKED = 16  # images that the artefact classifies twice
_LEFT_OUT = ("images", "witness", "classes")  # keys of a result that the common file does without


class FileEvaluation:
    """Measures an artefact and its twin on the test set.

    Arguments:
        folder: where results are kept; without one nothing is written.
        audit: `Audit`, or a `functools.partial` of it with the number of images, the seed and other options.
    """

    def __init__(self, setup: Setup, folder: Path | None, audit: Callable[..., Audit] = Audit) -> None:
        self.setup, self.folder = setup, folder
        model, data, threat = setup.artefact.model, setup.data, setup.threat
        folders = (None, None) if folder is None else (folder / "artefact", folder / "twin")
        self.artefact = audit(Subject(model, data, threat), folders[0])
        self.twin: Audit | None = None
        if setup.twin is not None:
            self.twin = audit(Subject(setup.twin.model, data, threat), folders[1], witness=model)

    def natural(self) -> dict[str, Any]:
        """Accuracy without an attack."""
        in_torch = None if self.twin is None else self.twin.natural()
        return {"name": "natural", "how": "images", "torch": in_torch, "deployed": self.artefact.natural()}

    def under(self, name: str, attack: Any) -> dict[str, Any]:
        """Accuracy under an attack: run on the artefact itself if it needs logits only, else replayed from the twin."""
        if is_black_box(attack):
            return {"name": name, "how": "queries", "torch": None, "deployed": self.artefact.under(name, attack)}
        result = self._need_twin().under(name, attack)
        return {"name": name, "how": "replayed", "torch": result, "deployed": self._replayed(result)}

    def worst(self, tests: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Accuracy under all attacks together: the robust accuracy, of the twin and of the artefact."""
        of_twin = [test["torch"] for test in tests if test["torch"] is not None]
        in_torch = self._need_twin().worst(of_twin) if len(of_twin) > 1 else None
        deployed = self.artefact.worst([test["deployed"] for test in tests])
        return {"name": deployed["name"], "how": "union", "torch": in_torch, "deployed": deployed}

    def curve(self, ball: Ball) -> list[dict[str, Any]]:
        """Accuracy over epsilon: the twin is attacked at each epsilon, and the images are replayed."""
        natural = self.natural()
        points = [{"epsilon": 0.0, "torch": _point(natural["torch"]), "deployed": _point(natural["deployed"])}]
        for attack in attacks_of_curve(ball):
            result = self._need_twin().under(f"{attack.name}-{attack.epsilon:.4g}", attack)
            values = {"torch": _point(result), "deployed": _point(self._replayed(result))}
            points.append({"epsilon": attack.epsilon, **values})
        return points

    def agreement(self) -> list[tuple[str, bool, dict[str, Any]]]:
        """The agreement of the artefact with torch networks: description, whether it is the twin, numbers."""
        pairs = [(self.setup.twin, True), (self.setup.original, False)]
        return [(net.words, own, self.artefact.agreement(net.model)) for net, own in pairs if net is not None]

    def checks(self, ball: Ball, tests: Sequence[dict[str, Any]]) -> list[Finding]:
        """Check that the artefact is the expected network, and that the twin's robustness is real."""
        artefact, origin = self.setup.artefact, self.setup.origin
        images = as_input(self.artefact.test.images[:_CHECKED], self.artefact.like)
        natural = next(test for test in tests if test["name"] == "natural")
        findings = [
            *checks.integrity(artefact, origin),
            *checks.stated(natural["deployed"], origin),
            *(checks.agreement(measured, words, exact=own) for words, own, measured in self.agreement()),
            checks.determinism(artefact, images),
            *checks.replays(natural, tests),
            *checks.queries(tests),
            *consistency.review([test["deployed"] for test in tests]),
        ]
        if self.twin is not None:
            of_twin = self.twin.checks(ball, [test["torch"] for test in tests if test["torch"] is not None])
            findings += [Finding(f"twin: {f['check']}", f["verdict"], f["text"]) for f in of_twin["findings"]]
        return findings

    def measure(
        self,
        attacks: Sequence[tuple[str, Any]],
        ball: Ball,
        *,
        curve: bool,
        corrupted: Corruptions | None,
        checks: bool,
    ) -> dict[str, Any]:
        """All results with everything that they depend on; they are also written into the folder."""
        tests = [self.natural(), *(self.under(name, attack) for name, attack in attacks)]
        more: dict[str, Any] = {}
        if curve and self.twin is not None:
            more["curve"] = self.curve(ball)
        if corrupted is not None:
            more["corruptions"] = self.artefact.corruptions(corrupted)
        findings = self.checks(ball, tests) if checks else []
        tests.append(self.worst(tests))
        artefact, twin = self.setup.artefact, self.setup.twin
        first = tests[0]["deployed"]
        summary = {
            "kind": KIND,
            "artefact": artefact.facts(),
            "twin": None if twin is None else {"words": twin.words, "network": self._need_twin().network},
            "threat": {"epsilon": ball.epsilon, "norm": ball.norm},
            **{key: first[key] for key in ("data", "source", "classes", "seed", "n", "batch", "measure", "versions")},
            "agreement": [
                {"with": words, "twin": own, **{key: measured[key] for key in ("agree", "n", "difference", "relative")}}
                for words, own, measured in self.agreement()
            ],
            "tests": [{**test, "torch": _short(test["torch"]), "deployed": _short(test["deployed"])} for test in tests],
            "checks": [vars(finding) for finding in findings],
            **more,
        }
        if self.folder is not None:
            named = [(test["name"], test["deployed"]["attack"]) for test in tests]
            twin_identity = None if self.twin is None else self.twin.identities[0]
            identity = f"{self.artefact.identities[0]}/{twin_identity}/{named}/{sorted(more)}/{bool(findings)}"
            digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
            files.write_json(self.folder / f"{KIND}-{artefact.path.name}-{digest}.json", summary)
        return summary

    def _replayed(self, result: dict[str, Any]) -> dict[str, Any]:
        """The artefact's result on the adversarial images of the twin."""
        right = torch.tensor([bit == "1" for bit in result["witness"]["images"]])
        return self.artefact.counted(right, result)

    def _need_twin(self) -> Audit:
        if self.twin is None:
            raise ModelError(f"{self.setup.artefact.path.name} has no twin: only attacks by queries can be run")
        return self.twin


def is_black_box(attack: Any) -> bool:
    """Whether an attack needs logits only."""
    return isinstance(attack, Square)


def _short(result: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if result is None else {key: value for key, value in result.items() if key not in _LEFT_OUT}


def _point(result: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if result is None else {key: result[key] for key in ("value", "low", "high", "n")}
