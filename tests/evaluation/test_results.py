"""The audit: every number once, in a file, for this network and this question only."""

import base64
import copy
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harp import models
from harp.attacks import Ball, Pgd
from harp.data import registry
from harp.errors import DataError, ModelError
from harp.evaluation import results as audits
from harp.evaluation import runner
from harp.evaluation.accuracy import Subject
from harp.evaluation.results import Audit
from harp.system.tensors import load_state

BALL = Ball(0.1, "linf")


@pytest.fixture(scope="module")
def subject() -> Subject:
    source = registry.load("digits")
    torch.manual_seed(0)
    model = models.build("tinynet", num_classes=10, shape=source.shape, width=4)
    images = source.train.images.float() / 255
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), source.train.labels).backward()
        optimizer.step()
    return Subject(model.eval(), source, BALL)


def audit_of(subject: Subject, folder: Path | None, **more: Any) -> Audit:
    return Audit(subject, folder, **{"examples": 80, "seed": 1, "batch": 32, **more})


def test_a_number_is_measured_once(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = audit_of(subject, tmp_path).under("pgd-3", Pgd(0.1, steps=3))
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["accuracy", "examples"]

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(audits.accuracy, "measure", never)
        assert audit_of(subject, tmp_path).under("pgd-3", Pgd(0.1, steps=3)) == json.loads(json.dumps(first))
        for other in (
            lambda: audit_of(subject, tmp_path, seed=2).under("pgd-3", Pgd(0.1, steps=3)),
            lambda: audit_of(subject, tmp_path, examples=79).under("pgd-3", Pgd(0.1, steps=3)),
            lambda: audit_of(subject, tmp_path).under("pgd-3", Pgd(0.05, steps=3)),
        ):
            with pytest.raises(AssertionError, match="measured again"):
                other()
        changed = copy.deepcopy(subject.model)
        with torch.no_grad():
            next(changed.parameters()).add_(1e-6)
        with pytest.raises(AssertionError, match="measured again"):
            audit_of(Subject(changed, subject.data, BALL), tmp_path).under("pgd-3", Pgd(0.1, steps=3))


def test_an_attack_is_not_lost_before_its_number_is_written(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SECONDS", 0.0)
    attack = Pgd(0.1, steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(audits, "insist", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            audit_of(subject, tmp_path).under("pgd-3", attack)
    (state,) = tmp_path.glob("*.state.pt")
    saved, attacked, call = len(load_state(state)["found"]), list[int](), Pgd.__call__
    with monkeypatch.context() as patch:
        patch.setattr(Pgd, "__call__", lambda self, model, x, y: attacked.append(len(x)) or call(self, model, x, y))
        found = audit_of(subject, tmp_path).under("pgd-3", attack)
    assert saved > 0 and len(attacked) == 3 - saved  # 80 images are three portions
    assert found["value"] == audit_of(subject, None).under("pgd-3", attack)["value"]
    assert not state.exists()
    state.write_bytes(b"left by a kill")
    audit_of(subject, tmp_path).under("pgd-3", attack)
    assert not state.exists()


def test_a_result_holds_all_that_it_depends_on(subject: Subject, tmp_path: Path) -> None:
    found = audit_of(subject, tmp_path).under("pgd-3", Pgd(0.1, steps=3))
    assert found["kind"] == "accuracy" and found["n"] == 80 == len(found["images"])
    assert found["value"] == found["images"].count("1") / 80
    assert found["low"] < found["value"] < found["high"]
    assert found["attack"]["epsilon"] == 0.1 and found["seed"] == 1 and "torch" in found["versions"]
    assert found["classes"] == list(subject.data.classes) and found["seconds"] > 0
    (path,) = tmp_path.glob("examples-*.json")
    pictures = json.loads(path.read_text())
    assert pictures["shape"] == [1, 8, 8] and 1 <= len(pictures["items"]) <= 8
    for item in pictures["items"]:
        before, after = (
            torch.frombuffer(bytearray(base64.b64decode(item[key])), dtype=torch.uint8) for key in ("image", "attacked")
        )
        original = subject.data.test.images[item["index"]].flatten()
        assert torch.equal(before, original) and int(subject.data.test.labels[item["index"]]) == item["label"]
        assert int((before.int() - after.int()).abs().max()) <= 26  # 0.1 of 255, rounded
        assert item["before"] == item["label"] != item["after"]


def test_worst_case_is_the_images_that_all_attacks_leave(subject: Subject) -> None:
    audit = audit_of(subject, None)
    results = [audit.natural(), audit.under("a", Pgd(0.1, steps=2)), audit.under("b", Pgd(0.05, steps=5))]
    worst = audit.worst(results)
    both = [a == b == "1" for a, b in zip(results[1]["images"], results[2]["images"], strict=True)]
    clean = [bit == "1" for bit in results[0]["images"]]
    assert worst["value"] == sum(b and c for b, c in zip(both, clean, strict=True)) / 80
    assert worst["value"] <= min(result["value"] for result in results) and worst["of"] == ["natural", "a", "b"]


def test_a_curve_begins_at_natural_accuracy(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "CURVE", (0.5, 1.0, 4.0))
    audit = audit_of(subject, None)
    curve = audit.curve(BALL)
    assert [point["epsilon"] for point in curve["points"]] == [0.0, 0.05, 0.1, 0.4]
    values = [point["value"] for point in curve["points"]]
    assert values[0] == audit.natural()["value"] and values == sorted(values, reverse=True)
    assert values[-1] < 0.1


def test_flips_count_what_pruning_changed(subject: Subject) -> None:
    other = copy.deepcopy(subject.model)
    with torch.no_grad():
        *_, last = other.parameters()
        last[3] += 5  # the last layer's bias: all that was near becomes a three
    found = audit_of(Subject(other, subject.data, BALL), None).flips(subject.model)
    assert found["both_right"] + found["lost"] + found["won"] + found["both_wrong"] == found["n"] == 80
    assert found["changed"] >= found["lost"] + found["won"] > 0
    for item in found["examples"]:
        x = subject.data.test.images[item["index"]][None] / 255
        assert int(subject.model(x).argmax()) == item["dense"] != item["pruned"] == int(other(x).argmax())
    assert audit_of(subject, None).flips(subject.model)["changed"] == 0


def test_distances_end_at_the_boundary(subject: Subject) -> None:
    found = audit_of(subject, None, examples=24).distances("linf")
    natural = audit_of(subject, None, examples=24).natural()
    zero = [value == 0 for value in found["values"]]
    assert zero == [bit == "0" for bit in natural["images"]]
    assert 0 < found["median"] < 1 and all(value is None or value <= 1 for value in found["values"])


class Broken(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.inner(x)
        return torch.where(x.flatten(1).sum(1, keepdim=True) > 20, float("nan"), answer)


def test_bad_input_is_one_line(subject: Subject, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not finite"):
        audit_of(Subject(Broken(subject.model), subject.data, BALL), None).natural()
    audit_of(subject, tmp_path).natural()
    (path,) = tmp_path.iterdir()
    path.write_text('{"kind": "accu')
    with pytest.raises(DataError, match="delete it"):
        audit_of(subject, tmp_path).natural()
    assert path.read_text() == '{"kind": "accu'
    narrow = models.build("tinynet", num_classes=5, shape=subject.data.shape, width=4)
    with pytest.raises(DataError, match="labels must be 0 to 4"):
        audit_of(Subject(narrow, subject.data, BALL), None).natural()


KILLED = """
import sys, torch
from pathlib import Path
from harp import models
from harp.data import registry
from harp.evaluation.accuracy import Subject
from harp.attacks import AutoAttackLite
from harp.evaluation import runner
from harp.evaluation.results import Audit
runner.SECONDS = 0.0
torch.set_num_threads(1)
source = registry.load("digits")
torch.manual_seed(0)
model = models.build("tinynet", num_classes=10, shape=source.shape, width=4).eval()
with torch.no_grad():
    model.classifier[-1].bias -= model(source.test.images[:200] / 255).mean(0)
print("ready", flush=True)
Audit(Subject(model, source), Path(sys.argv[1]), examples=150, batch=32).under("aa-lite", AutoAttackLite(0.02))
"""


@pytest.mark.slow
def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    def start(folder: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", KILLED, str(tmp_path / folder)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout as out:
            assert out.readline() == "ready\n"
        return process

    def found(folder: str) -> dict[str, Any]:
        (path,) = (tmp_path / folder).glob("accuracy-*.json")
        record: dict[str, Any] = json.loads(path.read_text())
        parts = [{key: part[key] for key in ("attack", "tried", "fooled", "left")} for part in record["parts"]]
        return {**{key: record[key] for key in ("value", "images", "correct")}, "parts": parts}

    began = time.monotonic()
    assert start("whole").wait() == 0
    length, generator, kills = time.monotonic() - began, random.Random(0), 0
    while kills < 10:
        process = start("killed")
        time.sleep(generator.uniform(0, 0.15 * length))
        process.kill()
        kills += process.wait() != 0
        if list((tmp_path / "killed").glob("accuracy-*.json")):
            break
    assert kills >= 3, "it ended before it could be killed: make it longer"
    assert start("killed").wait() == 0
    assert found("killed") == found("whole")
    assert not list((tmp_path / "killed").glob("*.pt")), "a finished number needs no state"
