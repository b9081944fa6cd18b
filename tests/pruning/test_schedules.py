"""Schedules: the learning rate's factor over a training."""

import pytest

from harp.errors import RecipeError
from harp.pruning import schedules


@pytest.mark.parametrize(
    ("part", "factors"),
    [
        ({"name": "constant"}, [1, 1, 1, 1]),
        ({"name": "cosine"}, [1, 0.85355, 0.5, 0]),
        ({"name": "steps", "at": [0.25, 0.5], "factor": 0.5}, [1, 0.5, 0.25, 0.25]),
        ({"name": "sawtooth", "periods": 2}, [1, 0.1, 1, 1]),
    ],
)
def test_a_schedule_is_a_function_of_progress(part: dict[str, object], factors: list[float]) -> None:
    schedule = schedules.from_recipe(part)
    assert [schedule(progress) for progress in (0, 0.25, 0.5, 1)] == pytest.approx(factors, abs=1e-5)


def test_wrong_options_are_refused() -> None:
    for at in ([0.5, 0.25], [0.0], [1.0]):
        with pytest.raises(RecipeError, match="rising shares between 0 and 1"):
            schedules.steps(at)
    with pytest.raises(RecipeError, match=r"0\.5 periods: give at least 1"):
        schedules.sawtooth(0.5)
