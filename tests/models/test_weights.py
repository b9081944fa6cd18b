"""Weights whose names differ from the model's: what loads, what is said, and what the error says."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harp.errors import CheckpointError, ModelError
from harp.models.normalize import USUAL, Normalized, constants
from harp.models.weights import load_weights
from support import cases

State = dict[str, Tensor]


class Norm(nn.Module):
    def __init__(self, mean: float = 0.5) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1, 3, 1, 1), mean))
        self.register_buffer("std", torch.full((1, 3, 1, 1), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def net(seed: int = 0) -> nn.Module:
    return cases.build("residual", seed=seed)


def behind(seed: int = 0, mean: float = 0.5) -> nn.Module:
    return nn.Sequential(Norm(mean), net(seed))


BARE = net().state_dict()
FILES: dict[str, tuple[Any, Callable[[], nn.Module], str]] = {
    "DataParallel": (prefixed("module.", BARE), lambda: net(1), ""),
    "torch.compile": (prefixed("_orig_mod.", BARE), lambda: net(1), ""),
    "Lightning": ({"state_dict": prefixed("model.", BARE), "epoch": 3}, lambda: net(1), "without the prefix 'model.'"),
    "deep": (prefixed("trainer.student.net.", BARE), lambda: net(1), "without the prefix 'trainer.student.net.'"),
    "averaged": ({**prefixed("module.", BARE), "n_averaged": torch.tensor(3)}, lambda: net(1), "'module.'"),
    "a container": ({"model_state_dict": BARE, "optimizer": {}}, lambda: net(1), ""),
    "an average": ({"ema": {"module": BARE, "decay": 0.9}}, lambda: net(1), ""),
    "two containers": ({"state_dict": BARE, "state_dict_ema": BARE}, lambda: net(1), "those of 'state_dict', not of"),
    "into a sequence": (BARE, lambda: behind(1), "with the prefix '1.'; the model's own 0.mean, 0.std"),
    "both": (prefixed("model.", BARE), lambda: behind(1), "without the prefix 'model.' and with the prefix '1.'"),
    "out of a sequence": (prefixed("1.", BARE), lambda: net(1), "without the prefix '1.'"),
    "a normalisation again": (behind().state_dict(), lambda: Normalized(net(1), [0.5] * 3, [0.25] * 3), "'net.'"),
    "inside": (BARE, lambda: Normalized(net(1), [0.5], [0.25]), ""),
}


@pytest.mark.parametrize("name", FILES)
def test_names_with_a_prefix_load_and_it_is_said(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content, make, said = FILES[name]
    torch.save(content, tmp_path / "w.pt")
    model = make()
    with caplog.at_level(logging.INFO, "harp"):
        load_weights(model, tmp_path / "w.pt")
    (loaded,) = [module for module in model.modules() if isinstance(module, cases.Residual)]
    assert all(torch.equal(tensor, BARE[key]) for key, tensor in loaded.state_dict().items())
    assert said in caplog.text and len(caplog.records) == bool(said)


REFUSED: dict[str, tuple[State, Callable[[], nn.Module], str]] = {
    "a lost normalisation": (
        behind().state_dict(),
        lambda: net(1),
        r"2 unexpected \(first '0.mean'\); .*--normalize 0.5,0.5,0.5/0.25,0.25,0.25$",
    ),
    "another normalisation": (
        behind(mean=0.4).state_dict(),
        lambda: Normalized(net(1), [0.5] * 3, [0.25] * 3),
        r"1 unexpected \(first '0.mean'\)",
    ),
    "other names": (
        {f"layer{number}": tensor for number, tensor in enumerate(BARE.values())},
        lambda: net(1),
        r"missing \(first 'stem.weight'\).*unexpected \(first 'layer0'\); all shapes fit in their order",
    ),
    "other classes": (
        {**BARE, "linear.weight": torch.ones(7, 16), "linear.bias": torch.ones(7)},
        lambda: net(1),
        r"2 of another shape \(first 'linear.weight': .*the same number of classes",
    ),
    "a part": (
        {name: tensor for name, tensor in prefixed("model.", BARE).items() if "linear" not in name},
        lambda: net(1),
        r"2 missing \(first 'linear.weight'\); without the prefix 'model.', \d+ of \d+ names fit",
    ),
    "another network": (cases.build("grouped").state_dict(), lambda: net(1), "is this the same architecture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mismatch_says_names_of_both_sides_and_the_likely_cause(name: str, tmp_path: Path) -> None:
    state, make, message = REFUSED[name]
    torch.save(state, tmp_path / "w.pt")
    model = make()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, tmp_path / "w.pt")
    assert re.search(message, str(caught.value)), caught.value
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_normalisation_from_text() -> None:
    assert constants("cifar10") == tuple(map(list, USUAL["cifar10"]))
    assert constants("0.5/0.25") == ([0.5], [0.25])
    assert constants("0.1,0.2,0.3/0.4,0.5,0.6") == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(Normalized(nn.Identity(), *constants("0.5/0.25"))(x), (x - 0.5) / 0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cifar", "write MEAN/STD"),
        ("0.5", "write MEAN/STD"),
        ("0.5/0.2/0.1", "write MEAN/STD"),
        ("/", "write MEAN/STD"),
        ("0.5,0.5/0.2", "2 means and 1 stds"),
        ("0.5/0", "std above 0"),
        ("nan/0.5", "finite"),
        ("125/60", "divide values for 0 to 255 by 255"),
    ],
)
def test_normalisation_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        constants(text)
