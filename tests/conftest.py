"""One torch thread a worker: the suite runs several workers, and spinning threads starve each other."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# New examples belong on a developer's machine: a check that gates everybody's work must give the same answer twice.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
