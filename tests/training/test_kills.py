"""Twenty kills of a run of two processes: nothing is lost beyond the last state, and the end is the same to the bit."""

from pathlib import Path

import pytest

from support.kills import torture


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_twenty_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    facts = torture(tmp_path, 20)
    assert facts["same bits"] and facts["kills"] == 20
