"""Launching Fabric: processes, precision, cores and addresses."""

from typing import Any

import pytest
import torch

from harp.errors import RecipeError
from harp.system.distributed import affinity as cores
from harp.system.distributed import fabric, launcher
from harp.system.distributed.environment import Place, read_address
from support.commands import Harp, refused


class Started(Exception):
    """Raised in place of starting a process."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments of processes that would have been started."""
    environments: list[dict[str, str]] = []

    def start(command: list[str], env: dict[str, str], **more: Any) -> None:
        environments.append(env)
        raise Started

    monkeypatch.setattr(launcher.subprocess, "Popen", start)
    return environments


def test_node_rank_is_ignored_if_torchrun_or_srun_started_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clusters set NODE_RANK in addition to the variables of torchrun or srun."""
    monkeypatch.setattr("lightning_fabric.Fabric", Launched)
    with monkeypatch.context() as started:
        for name, value in Place(1, 2, 1, 2).environment().items():
            started.setenv(name, value)
        cluster = fabric.launch("32-true", "cpu", node_rank=3).settings["strategy"].cluster_environment
        assert (cluster.global_rank(), cluster.world_size(), cluster.local_rank(), cluster.node_rank()) == (1, 2, 1, 0)
    (cluster,) = fabric.launch("32-true", "cpu", node_rank=3).settings["plugins"]
    assert (cluster.global_rank(), cluster.world_size()) == (0, 1)
    with pytest.raises(RecipeError, match=r"node rank 3 .* of 1 nodes: give 0 to 0"):
        fabric.launch("32-true", "cpu", devices=2, node_rank=3)


class Launched:
    """A fabric that starts nothing."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def launch(self) -> None:
        pass


def test_buffers_are_not_exchanged_with_every_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in Place(1, 2, 1, 2).environment().items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("lightning_fabric.Fabric", Launched)
    (name, wish), *more = fabric.launch("32-true", "cpu").settings["strategy"]._ddp_kwargs.items()
    assert name in ("broadcast_buffers", "forward_sync_buffers") and wish is False and not more


# ---------------------------------------------------------------- precision


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def ampere(including_emulation: bool = True) -> bool:
    return True


def turing(including_emulation: bool = True) -> bool:
    return including_emulation


@pytest.mark.parametrize("accelerator", ["auto", "cuda", "gpu"])
def test_bfloat16_is_for_gpus_that_have_it(gpu: None, monkeypatch: pytest.MonkeyPatch, accelerator: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", ampere)
    assert fabric.resolve("auto", accelerator) == "bf16-mixed"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", turing)
    assert fabric.resolve("auto", accelerator) == "32-true"
    assert fabric.resolve("bf16-mixed", accelerator) == "bf16-mixed"


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "32-true"), ((8, 0), "bf16-mixed")])
def test_bfloat16_with_an_old_torch_that_counts_emulation(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert fabric.resolve("auto") == expected


def test_an_unused_gpu_does_not_change_the_precision(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", ampere)
    assert fabric.resolve("auto", "cpu") == "32-true"
    monkeypatch.setattr("lightning_fabric.Fabric", Launched)
    assert fabric.launch("auto", "cpu").settings["precision"] == "32-true"


# ---------------------------------------------------------------- cores


def sharing(*bound: set[int]) -> int:
    """With the processes of this machine bound to these cores, and one process on another machine."""
    return cores.sharers(
        lambda own: [*((own[0], frozenset(own_cores)) for own_cores in bound), ("another machine", own[1])]
    )


def test_processes_share_cores_unless_each_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun binds tasks to cores, and does not set LOCAL_WORLD_SIZE."""
    monkeypatch.setattr(cores, "usable", lambda: frozenset({0, 1, 2}))
    assert sharing({0, 1, 2}) == 1
    assert sharing({0, 1, 2}, {3, 4, 5}, {6, 7, 8}) == 1
    assert sharing(*[{0, 1, 2}] * 4) == 4
    assert sharing({0, 1, 2}, {2, 3}) == 2


@pytest.mark.parametrize(
    ("on_cpu", "wished", "expected"), [(True, None, "2"), (True, "5", "5"), (False, None, None), (False, "5", "5")]
)
def test_processes_on_the_cpu_share_its_threads(
    started: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    on_cpu: bool,
    wished: str | None,
    expected: str | None,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wished is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wished)
    monkeypatch.setattr(cores, "usable", lambda: frozenset(range(8)))
    with pytest.raises(Started):
        launcher.supervise(4, on_cpu=on_cpu)
    assert started[0].get("OMP_NUM_THREADS") == expected


def test_launch_divides_the_threads_of_the_cpu(started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.raises(Started):
        fabric.launch("32-true", "cpu", devices=99)
    assert started[0]["OMP_NUM_THREADS"] == "1"


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu01", ("gpu01", None)),
        ("gpu01.site:29500", ("gpu01.site", 29500)),
        ("10.0.0.7:1234", ("10.0.0.7", 1234)),
        ("[::1]:29500", ("::1", 29500)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", None)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int | None]) -> None:
    assert read_address(text) == expected


@pytest.mark.parametrize("text", ["host:abc", "host:", ":29500", "", "a:70000", "a:0", "::1", "[::1", "a b:1"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"write HOST or HOST:PORT"):
        read_address(text)


def test_a_wrong_address_ends_the_command_with_2(harp: Harp) -> None:
    words = ("run", "demo", "--devices", "2", "--nodes", "2", "--accelerator", "cpu", "--main-address", "host:abc")
    refused(harp, *words, said="main address 'host:abc'")
