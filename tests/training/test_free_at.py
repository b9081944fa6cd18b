"""Free-AT is the paper's loop step by step, costs one pass an update, and is never lost; fast training is one step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from harp.attacks import Pgd
from harp.data.batches import Batches
from harp.data.dataset import Split
from harp.errors import RecipeError
from harp.pruning.methods import PRUNERS, Dense, Fixed, Harp, Magnitude
from harp.pruning.schedules import constant, steps
from harp.pruning.units import Weights
from harp.system.distributed.shared_noise import common, normal, shared, uniform
from harp.training.free_at import FreeTraining
from harp.training.loop import fit
from harp.training.objectives import OBJECTIVES, FastTraining
from support import cases
from support.methods import Memory

EPSILON = 4 / 255


def data(count: int = 20, batch: int = 8) -> Batches:
    """Images with black and white pixels, where the clipping of the first step counts; the last batch is smaller."""
    images = (torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 1.4 - 0.2).clamp(0, 1)
    return Batches(Split(images, torch.arange(count) % 4), batch, seed=3)


def network() -> nn.Module:
    torch.manual_seed(0)
    conv = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*conv, nn.Flatten(), nn.Linear(72, 4))


def kept_noise(keeper: Memory) -> Tensor:
    state = keeper.load()
    assert state is not None
    noise: Tensor = state["noise"]
    return noise


def letter(model: nn.Module, epochs: int, replays: int, lr: float, fresh: bool, masks: Any = None) -> Tensor:
    """The published loop, word by word: the noise is a variable of its own that autograd differentiates through."""
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    noise = torch.zeros(8, 3, 8, 8)
    model.train()
    for epoch in range(epochs):
        if fresh:
            noise.zero_()
        for x, y in data()(epoch):
            for _ in range(replays):
                variable = noise[: len(x)].clone().requires_grad_(True)
                loss = F.cross_entropy(model((x + variable).clamp(0, 1)), y)
                optimizer.zero_grad()
                loss.backward()
                assert variable.grad is not None
                noise[: len(x)] += EPSILON * variable.grad.sign()
                noise.clamp_(-EPSILON, EPSILON)
                for name, mask in (masks or {}).items():
                    gradient = model.get_parameter(name).grad
                    assert gradient is not None
                    gradient[~mask] = 0
                optimizer.step()
                for name, mask in (masks or {}).items():
                    with torch.no_grad():
                        model.get_parameter(name).mul_(mask)
    return noise


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_free_training_equals_the_papers_loop_bit_for_bit(fresh: bool, masked: bool) -> None:
    model, twin = network(), network()
    pruner: Any = Dense(Weights(model))
    masks = None
    if masked:
        masks = Magnitude(Weights(network()), keep=0.3).masks()
        pruner = Fixed(Weights(model), masks)
        for name, mask in masks.items():
            twin.get_parameter(name).data.mul_(mask)
    objective = FreeTraining(epsilon=EPSILON, replays=3, fresh=fresh)
    keeper = Memory()
    fit(model, data(), objective, pruner, epochs=3, lr=0.05, schedule=constant, keeper=keeper)
    noise = letter(twin, 3, 3, 0.05, fresh, masks)
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(kept_noise(keeper), noise)
    assert (noise.abs() <= EPSILON).all() and noise.abs().max() > 0


def test_an_update_costs_one_forward_and_one_backward_pass() -> None:
    model, calls = network(), {"forward": 0, "backward": 0}
    model.register_forward_hook(lambda *_: calls.update(forward=calls["forward"] + 1))
    model[0].register_full_backward_hook(lambda *_: calls.update(backward=calls["backward"] + 1))
    before = calls["forward"]
    updates: list[float] = []
    fit(
        model,
        data(16),
        FreeTraining(replays=5),
        Dense(Weights(model)),
        epochs=2,
        lr=0.01,
        on_step=lambda record: updates.append(record["loss"]),
    )
    looks = 1  # at the first image, for the number of classes
    assert len(updates) == 2 * 2
    assert calls["forward"] - before - looks == calls["backward"] == 2 * 2 * 5


def test_the_plan_and_the_schedule_count_every_replay() -> None:
    model = network()
    pruner = Harp(Weights(model), keep=0.2)
    seen: dict[str, Any] = {}
    begin = pruner.start
    pruner.start = lambda plan=None: (seen.update(plan=plan), begin(plan))[0]  # type: ignore[assignment, method-assign]
    rates: list[float] = []
    after = pruner.after_step
    pruner.after_step = lambda: (rates.append(pruner._optimizer.param_groups[0]["lr"]), after())[0]  # type: ignore
    fit(model, data(16), FreeTraining(replays=4), pruner, epochs=1, lr=0.1, schedule=steps(at=[0.5], factor=0.1))
    assert seen["plan"].steps == 2 * 4
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 4)


def test_a_resumed_free_training_keeps_its_noise() -> None:
    def train(keeper: Memory) -> dict[str, Tensor]:
        model = network()
        fit(model, data(), FreeTraining(replays=2), Harp(Weights(model), keep=0.2), epochs=3, lr=0.1, keeper=keeper)
        return model.state_dict()

    expected = train(Memory())
    for after in (1, 2, 4, 5):
        keeper = Memory(stop_after=after)
        with pytest.raises(InterruptedError):
            train(keeper)
        resumed = train(Memory(state=keeper.state))
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_parts_of_a_batch_have_their_own_rows_of_noise() -> None:
    def train(accumulate: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 4)).double()
        images, labels = (whole := data().split).images.double(), whole.labels
        batches = [(images[:8], labels[:8]), (images[8:16], labels[8:16])]
        fit(model, batches, FreeTraining(), Dense(Weights(model)), epochs=2, lr=0.1, accumulate=accumulate)
        return model.state_dict()

    one, four = train(1), train(4)
    for name, value in one.items():
        torch.testing.assert_close(four[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", [name for name in PRUNERS if name != "fixed"])
def test_every_method_trains_with_free_training(method: str) -> None:
    model = cases.build("conv")
    pruner = PRUNERS[method](Weights(model), **({} if method == "dense" else {"keep": 0.2}))
    keeper = Memory()
    fitted = fit(model, data(16), FreeTraining(replays=2), pruner, epochs=1, lr=0.05, keeper=keeper)
    assert pruner.units.spent(fitted.masks) == pruner.total
    noise = kept_noise(keeper)
    assert (noise.abs() <= EPSILON).all()
    assert method == "mad" or noise.abs().max() > 0, "MAD only measures, and moves nothing"
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_fast_training_is_one_long_step_from_a_random_start() -> None:
    model, (x, y) = network(), next(iter(data()(0)))
    fast = FastTraining(epsilon=0.1)
    assert fast.step == pytest.approx(0.125) and fast.steps == 1
    torch.manual_seed(5)
    x_adv = fast.attack(model, x, y)
    torch.manual_seed(5)
    start = (x + 0.1 * (2 * torch.rand(x.shape) - 1)).clamp(0, 1).requires_grad_(True)
    model.eval()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(start), y, reduction="sum"), start)
    expected = torch.clamp(start.detach() + 0.125 * gradient.sign(), x - 0.1, x + 0.1).clamp(0, 1)
    assert (x_adv - expected).abs().le(1e-6).float().mean() > 0.99, "but where a gradient is zero up to rounding"
    assert fast.judge() == Pgd(0.1)
    assert FastTraining(epsilon=0.1, step=0.05).step == 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replays": 0}, "replays must be a whole number of 1 or more"),
        ({"epsilon": -1}, "epsilon must be"),
        ({"step": float("nan")}, "step must be"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        OBJECTIVES["free"](**options)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_draw_the_noise_of_the_whole_batch(world: int) -> None:
    whole = torch.empty(8, 3, 2)
    for draw in (uniform, normal):
        with shared(7):
            first, second = draw(whole), draw(whole)
        for rank in range(world):
            with shared(7, rank, world):
                assert torch.equal(draw(whole[rank::world]), first[rank::world])
                assert torch.equal(draw(whole[rank::world]), second[rank::world])
    with shared(7):
        expected = common(whole)
    with shared(7, 1, world):
        assert torch.equal(common(whole), expected)
    torch.manual_seed(7)
    drawn = uniform(whole)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(whole.shape)), "outside, it is torch's own generator"
