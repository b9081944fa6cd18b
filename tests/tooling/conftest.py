"""The scripts must see the repository of the test, not the one whose hook runs the tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def without_git_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
