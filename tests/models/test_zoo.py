"""The trained networks of the package are what their cards say."""

from pathlib import Path

import pytest
import torch

import harp
from harp.errors import HarpError, ModelError
from harp.experiments import build
from harp.models import zoo
from support.commands import Harp

PRUNED = [name for name in zoo.names() if zoo.card(name)["kept"] < zoo.card(name)["size"]]


def result(name: str, data: str, test: str) -> dict[str, object]:
    rows = zoo.card(name)["results"]
    return next(row for row in rows if row["data"] == data and row["test"] == test)


def test_each_network_is_small_and_has_a_card_with_its_evidence() -> None:
    assert PRUNED
    for name in zoo.names():
        card = zoo.card(name)
        assert {row["test"] for row in card["results"]} >= {"natural", "pgd-20"}, name
        assert all(row["interval"][0] <= row["accuracy"] <= row["interval"][1] for row in card["results"])
        assert {"command", "seed", "device", "versions"} <= card["training"].keys()
        assert zoo.weights_file(name).stat().st_size <= 300_000


@pytest.mark.parametrize("name", PRUNED)
def test_the_budget_is_exact_and_the_masks_say_where(name: str) -> None:
    model, masks = zoo.load(name), zoo.masks(name)
    weights = {key: value for key, value in model.named_parameters() if value.ndim > 1}
    assert masks.keys() == weights.keys()
    assert sum(int(mask.sum()) for mask in masks.values()) == zoo.card(name)["kept"]
    assert not any(bool(weights[key][~mask].any()) for key, mask in masks.items())


@pytest.mark.parametrize("name", PRUNED)
def test_the_sparse_file_gives_the_same_answers(name: str) -> None:
    """Up to half precision, in which the file has weights with the batch norms folded in."""
    images = harp.load_data("digits").test.images.float() / 255
    with torch.no_grad():
        expected = zoo.load(name)(images)
    logits = torch.as_tensor(harp.load(zoo.path(name))(images))
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    assert torch.allclose(logits, expected, atol=0.03)


@pytest.mark.parametrize("name", zoo.names())
def test_the_numbers_of_the_card_are_measured_again(name: str) -> None:
    """Natural accuracy exactly; under attack within the interval, as other machines round differently."""
    subject = build.load(f"zoo:{name}", "digits", None, None)
    images, labels = subject.data.test.images.float() / 255, subject.data.test.labels
    natural, attacked = result(name, "digits", "natural"), result(name, "digits", "pgd-20")
    assert round(harp.accuracy(subject.model, images, labels).accuracy * 500) == round(
        float(str(natural["accuracy"])) * 500
    )
    score = harp.accuracy(subject.model, images, labels, attack=harp.Pgd(subject.threat.epsilon, steps=20))
    low, high = attacked["interval"]  # type: ignore[misc]
    assert low <= score.accuracy <= high


def test_pruning_starts_from_the_trained_weights(harp: Harp) -> None:
    words = ("prune", "zoo:digits-tinynet", "--data", "digits", "--keep", "10%", "--prune", "1", "--finetune", "0")
    code, _, _ = harp(*words)
    assert code == 0
    (folder,) = Path("runs").glob("*/summary.json")
    assert "pretrain" not in folder.read_text("utf-8")
    dense = result("digits-tinynet", "digits", "natural")["accuracy"]
    assert f'"accuracy": {dense}' in folder.read_text("utf-8")


@pytest.mark.parametrize(
    ("spec", "shape", "options", "words"),
    [
        ("zoo:digit-tinynet", (1, 8, 8), {}, "did you mean 'digits-tinynet'"),
        ("zoo:digits-tinynet", (3, 32, 32), {}, "doesn't fit the model"),
        ("zoo:digits-tinynet", (1, 8, 8), {"width": 3}, "give none"),
    ],
)
def test_what_does_not_fit_is_one_line(
    spec: str, shape: tuple[int, int, int], options: dict[str, int], words: str
) -> None:
    with pytest.raises(HarpError, match=words):
        harp.build_model(spec, num_classes=10, shape=shape, **options)


def test_a_dense_network_has_no_sparse_file() -> None:
    with pytest.raises(ModelError, match="is dense"):
        zoo.path("digits-tinynet")
