"""Every method has the loss curve that was recorded."""

import json

import pytest

from support.golden import FILE, METHODS, curve


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_curve_is_the_golden_one(method: str) -> None:
    golden = json.loads(FILE.read_text())
    assert method in golden, (
        f"no golden run of {method!r}: record it with `PYTHONPATH=tests python -m support.golden {method}`"
    )
    assert curve(method) == pytest.approx(golden[method], rel=1e-4)
