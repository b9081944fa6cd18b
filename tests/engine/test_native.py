"""The engine's library: which kernels are used, and errors of the variables that select others."""

import copy
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from harp.engine.native import bindings
from harp.engine.native.bindings import NARROW, WINOGRAD
from harp.errors import RecipeError
from support.engines import close, engine_of, ops

pytestmark = pytest.mark.skipif(bindings.kernels() is None, reason="this installation has no native code")


def able() -> list[str]:
    code = bindings.library()
    assert code is not None
    return [isa for isa in bindings.ISAS if code.harp_kernels(isa.encode())]


@pytest.mark.parametrize("isa", bindings.ISAS)
def test_harp_isa_selects_kernels(isa: str) -> None:
    code = "from harp.engine.native import bindings; print(bindings.kernels().name.decode())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HARP_ISA": isa}, capture_output=True, text=True
    )
    if isa in able():
        assert (done.returncode, done.stdout.strip()) == (0, isa), done.stderr
    else:
        assert f"HARP_ISA={isa}: this CPU does not have it; choose from" in done.stderr


def test_unknown_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARP_ISA", "avx3")
    with pytest.raises(RecipeError, match=f"^HARP_ISA=avx3: there is none of this name; choose from {able()[0]}"):
        bindings.kernels.__wrapped__()
    monkeypatch.setenv("HARP_ISA", "avx512")
    with mock.patch.object(bindings, "library") as library:
        library.return_value.harp_kernels = lambda name: name == b"baseline"
        with pytest.raises(RecipeError, match=r"avx512: this CPU does not have it; choose from baseline$"):
            bindings.kernels.__wrapped__()
        library.return_value = None
        with pytest.raises(RecipeError, match="there is no native code here"):
            bindings.kernels.__wrapped__()
        monkeypatch.setenv("HARP_NATIVE", "0")
        assert bindings.kernels.__wrapped__() is None


def test_a_library_that_cannot_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HARP_NATIVE", raising=False)
    for file, words in (
        (tmp_path / "none.so", "none.so: .*[Nn]o such file"),
        (Path(__file__), "test_native.py: "),
    ):
        monkeypatch.setenv("HARP_NATIVE_LIBRARY", str(file))
        with pytest.raises(RecipeError, match=f"{words}.*; name one that") as error:
            bindings.library.__wrapped__()
        assert "\n" not in str(error.value)
    monkeypatch.setenv("HARP_NATIVE", "0")
    assert bindings.library.__wrapped__() is None


def every_way() -> nn.Module:
    """Something for every kernel: tiles, panels, blocks, strides, groups, pooling, clipping."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU6(),
        nn.Conv2d(24, 32, 3, padding=1),
        nn.LeakyReLU(0.1),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).eval()


@pytest.mark.parametrize("isa", bindings.ISAS)
def test_every_instruction_set_computes_what_torch_does(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa not in able():
        pytest.skip(f"this CPU has no {isa}")
    code = bindings.library()
    assert code is not None
    fit = code.harp_kernels(isa.encode()).contents
    monkeypatch.setattr(bindings, "kernels", lambda: fit)
    model = every_way()
    engine = engine_of(model, (3, 12, 12))
    assert (engine.isa, engine.native_share) == (isa, 1.0)
    assert WINOGRAD in ops(engine, int(fit.lanes)) and NARROW in ops(engine, 1)
    exact = copy.deepcopy(model).double()
    for count in (17, 29):  # one is left, or a part of a group
        x = torch.rand(count, 3, 12, 12)
        points = x.double().requires_grad_(True)
        wanted = exact(points)
        (slope,) = torch.autograd.grad(wanted.sum(), points)
        logits, trace = engine.forward(x.numpy(), keep=True)
        assert close(logits, wanted.detach())
        assert close(engine.backward(trace, np.ones_like(logits)), slope, 1e-4)


class Longer(ctypes.Structure):
    _fields_ = (*bindings.Step._fields_, ("more", ctypes.c_int64))


@pytest.mark.parametrize(("name", "other"), [("ABI", bindings.ABI + 1), ("Step", Longer), ("Program", Longer)])
def test_a_library_of_another_version_is_not_used(name: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code = bindings.library()
    assert code is not None
    monkeypatch.setattr(bindings, name, other)
    monkeypatch.delenv("HARP_NATIVE_LIBRARY", raising=False)
    assert bindings.library.__wrapped__() is None
    monkeypatch.setenv("HARP_NATIVE_LIBRARY", code._name)
    with pytest.raises(RecipeError, match="it is of another version; name one that"):
        bindings.library.__wrapped__()
