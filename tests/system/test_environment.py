"""The place of a process that torchrun, srun or nothing has started."""

import pytest

from harp.errors import RecipeError
from harp.system.distributed.environment import Place, first_host, here

STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
}


def test_a_plain_process_has_no_place() -> None:
    assert here({"HOME": "/root"}) is None


def test_a_place_is_restored_from_its_environment_variables() -> None:
    place = Place(5, 8, 1, 4, 1, 2, "10.0.0.1", 1234)
    assert here(place.environment()) == place


def test_torchrun() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    place = here({**variables, "MASTER_ADDR": "a", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "x"})
    assert place == Place(3, 4, 1, 2, 1, 2, "a", 7)


def test_a_task_of_srun_takes_the_numbers_of_its_step() -> None:
    assert here(STEP) == Place(3, 5, 1, 2, 1, 3, "gpu03", 15000 + 3456)
    assert here({**STEP, "SLURM_NODEID": "2"}) == Place(3, 5, 1, 1, 2, 3, "gpu03", 18456)
    place = here({**STEP, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "99"})
    assert place is not None and (place.address, place.port) == ("10.1.1.1", 99)


def test_a_batch_script_without_srun_is_a_single_process() -> None:
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert here({**batch, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}) is None


def test_a_single_task_of_srun_has_no_place() -> None:
    assert here({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-4]", "n1"), ("n[07,9],m", "n07"), ("n[5]", "n5"), ("r-n[02-3]-ib,x", "r-n02-ib")],
)
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_invalid_environment_variables_are_refused() -> None:
    with pytest.raises(RecipeError, match="tasks per machine"):
        here({**STEP, "SLURM_STEP_TASKS_PER_NODE": "many"})
    with pytest.raises(RecipeError, match="environment variables of a distributed run"):
        here({**Place().environment(), "RANK": "first"})
