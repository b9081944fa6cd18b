"""Every method still learns what it learned."""

import json

import pytest

from harp.pruners import PRUNERS
from tests.golden import FILE, curve


@pytest.mark.parametrize("method", sorted(PRUNERS))
def test_the_loss_curve_is_the_golden_one(method: str) -> None:
    assert curve(method) == pytest.approx(json.loads(FILE.read_text())[method], rel=1e-4)
