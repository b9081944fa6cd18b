"""What shipped names stand for: every recipe and study is to the digit what the snapshot says."""

import pytest

from support.recipes_snapshot import recipe_line, resolved, snapshot, study_line

SNAPSHOT = snapshot()


@pytest.mark.parametrize("name", SNAPSHOT["in full"])
def test_a_recipe_is_in_full_as_in_the_snapshot(name: str) -> None:
    assert resolved(name) == SNAPSHOT["in full"][name]


@pytest.mark.parametrize("name", SNAPSHOT["recipes"])
def test_a_recipe_is_as_in_the_snapshot(name: str) -> None:
    assert recipe_line(name) == SNAPSHOT["recipes"][name]


@pytest.mark.parametrize("name", SNAPSHOT["studies"])
def test_a_study_is_as_in_the_snapshot(name: str) -> None:
    assert study_line(name) == SNAPSHOT["studies"][name]
