"""The benchmark of attacks compares like with like. How long it takes is the machine's business."""

import json
import os
from typing import Any

import pytest

from benchmarks import attack
from harp.engine.native import bindings

TINY = ["--model", "resnet8", "--width", "0.5", "--keep", "0.1"]
SMALL = ["--trained-width", "0.25", "--train-images", "256", "--agreement-images", "32"]
needs_native = pytest.mark.skipif(bindings.kernels() is None, reason="no native code for this machine")


def last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@needs_native
def test_attack_prints_a_table_and_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert attack.main([*TINY, *SMALL, "--batch", "4", "--repeats", "1", "--epochs", "1"]) == 0
    result = last(capsys)
    for part in ("attack", "evaluation", "step"):
        seconds = result[f"{part}_seconds"]
        assert min(seconds["engine"]) > 0
        assert result[f"speedup_{part}"] == pytest.approx(seconds["dense"][0] / seconds["engine"][0], rel=0.1, abs=0.02)
    assert result["median_gradient_error"] < 1e-4
    assert result["max_relative_error"] < 1e-4
    for pair in ("engine", "control"):
        alike = result["agreement"][pair]
        # From another start no pixel would be equal, by other gradients half of them. Rounding flips few, by CPU.
        assert alike["equal_pixels_1"] > 0.9 and alike["equal_pixels_10"] > 0.7
        assert alike["loss_difference"] < 0.1
        assert abs(alike["robust"] - result["agreement"]["robust_dense"]) <= 4 / 32
    assert "HARP_ENGINE" not in os.environ


@needs_native
@pytest.mark.slow
def test_parts_of_the_attack_benchmark_can_be_had_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert attack.main([*TINY, "--batch", "2", "--repeats", "1", "--parts", "pass"]) == 0
    result = last(capsys)
    assert "speedup_attack" in result and not {"speedup_step", "speedup_evaluation", "agreement"} & result.keys()


def test_without_native_code_there_is_nothing_to_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attack.bindings, "kernels", lambda: None)
    assert attack.main([*TINY, "--parts", "pass"]) == 2
    assert "no native code" in capsys.readouterr().err


@needs_native
@pytest.mark.parametrize("wrong", [["--model", "nope"], ["--keep", "2"], ["--strategy", "harp"]])
def test_what_is_wrong_is_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert attack.main([*TINY, *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
