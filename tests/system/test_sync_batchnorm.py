"""Batch norms over several processes are those of one process that sees all images."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from harp.system.distributed.sync_batchnorm import Synchronised, share_buffers

WORLD = 3
SIZES = [5, 1, 2]  # images of each process


def network(norms: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6, **norms), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 4, 3), nn.BatchNorm1d(3, **norms)).double()


KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "cumulative": {"momentum": None},
    "momentum": {"momentum": 0.7, "eps": 0.1},
    "plain": {"affine": False},
    "stateless": {"track_running_stats": False},
}


def images() -> Tensor:
    return 3 + torch.rand(sum(SIZES), 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def learned(model: nn.Module, forward: Any, x: Tensor, share: float) -> dict[str, Tensor]:
    """What two passes leave: answers, gradients of the images and of the parameters, buffers."""
    found: dict[str, Tensor] = {}
    for time in range(2):
        x = x.detach().requires_grad_(True)
        answer = forward(x + time)
        (answer.square() * (1 + torch.arange(3))).sum().mul(share).backward()
        found |= {f"answer{time}": answer.detach(), f"images{time}": x.grad}
    return found | {n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers())


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    found: dict[str, Any] = {}
    for kind, norms in KINDS.items():
        model = network(norms)
        before = [type(module) for module in model.modules()], list(model.state_dict())
        found[kind] = learned(model, Synchronised(model), images()[mine], 1.0)
        assert before == ([type(module) for module in model.modules()], list(model.state_dict()))
        assert not any("forward" in vars(module) for module in model.modules())
    single = network({}).float()
    with torch.autocast("cpu", torch.bfloat16):
        low = Synchronised(single)(images()[mine].float())
    (low.float() ** 3).sum().backward()
    found["bfloat16"] = {"answer": low.detach(), "mean": single[1].running_mean, "weight": single[0].weight.grad}
    quiet = network({}).eval()
    found["eval"] = {"answer": Synchronised(quiet)(images()[mine]).detach(), **dict(quiet.named_buffers())}
    apart = network({})
    apart(images()[mine][:, :, : 6 - rank // 3] * (rank + 1)) if len(images()[mine]) > 1 else None
    share_buffers(apart)
    found["shared"] = dict(apart.named_buffers())
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(Path(folder, str(rank)), weights_only=True) for rank in range(WORLD)]


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_outputs_and_gradients_equal_those_of_one_process(ranks: list[dict[str, Any]], kind: str) -> None:
    model = network(KINDS[kind])
    alone = learned(model, model, images(), 1.0)
    for name, value in alone.items():
        parts = [found[kind][name] for found in ranks]
        if name.startswith(("answer", "images")):
            found = torch.cat(parts)
        elif name in dict(model.named_parameters()):
            found = sum(parts)  # every process has the gradient of its own images
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            found = parts[0]
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_autocast_keeps_statistics_in_float32(ranks: list[dict[str, Any]]) -> None:
    model = network({}).float()
    with torch.autocast("cpu", torch.bfloat16):
        answer = model(images().float())
    (answer.float() ** 3).sum().backward()
    found = [each["bfloat16"] for each in ranks]
    assert found[0]["answer"].dtype == answer.dtype
    torch.testing.assert_close(torch.cat([each["answer"] for each in found]), answer.detach(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(found[1]["mean"], model[1].running_mean, rtol=1e-3, atol=1e-4)
    weight = sum(each["weight"] for each in found)
    assert (weight - model[0].weight.grad).norm() < 0.05 * model[0].weight.grad.norm()


def test_eval_mode_is_unchanged(ranks: list[dict[str, Any]]) -> None:
    model = network({}).eval()
    expected = model(images()).detach()
    torch.testing.assert_close(torch.cat([found["eval"]["answer"] for found in ranks]), expected)
    for name, buffer in model.named_buffers():
        assert all(torch.equal(found["eval"][name], buffer) for found in ranks)


def test_buffers_are_copied_from_process_0(ranks: list[dict[str, Any]]) -> None:
    expected = network({})
    expected(images()[: SIZES[0]])
    for found in ranks:
        for name, buffer in expected.named_buffers():
            assert torch.equal(found["shared"][name], buffer), name


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_host_does_not_wait_for_the_device(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number that is read from a GPU is a stop, here for every batch norm of every pass."""

    def read(*arguments: Any) -> None:
        raise AssertionError("a number was read")

    norm, x = nn.BatchNorm1d(3), torch.rand(4, 3, requires_grad=True)
    with monkeypatch.context() as patch:
        for name in ("item", "__float__", "__int__", "__bool__", "tolist", "cpu", "numpy"):
            patch.setattr(Tensor, name, read)
        Synchronised(norm)(x).square().sum().backward()
    assert x.grad is not None


def test_one_value_a_channel_is_refused_as_torch_does(group: None) -> None:
    norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="more than one value"):
        Synchronised(copy.deepcopy(norm))(torch.rand(1, 3))
    x = torch.rand(4, 3)
    torch.testing.assert_close(Synchronised(copy.deepcopy(norm))(x), norm(x))
