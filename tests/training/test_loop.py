"""The loop: which epoch it selects, what it refuses, and which batches it takes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning_fabric.wrappers import _FabricDataLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

from harp.errors import CheckpointError, DataError, Diverged, ModelError, RecipeError
from harp.pruning.methods import Dense, Fixed, Harp, Hydra, Magnitude
from harp.pruning.schedules import constant, cosine
from harp.pruning.units import Weights
from harp.system.distributed import shared_noise
from harp.training.base import Objective
from harp.training.dataloaders import EpochBatches, by_epoch
from harp.training.loop import fit
from harp.training.objectives import Natural, PgdTraining
from support import cases
from support.documents import blocks
from support.methods import Memory, Three


class Noisy(Dataset[tuple[Tensor, int]]):
    """Images with a random augmentation drawn from the global generator, as most data sets do."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (torch.rand(3, 8, 8) * 0.5 + index / 48).clamp(0, 1), index % 4


def loader() -> DataLoader[tuple[Tensor, int]]:
    return DataLoader(Noisy(), batch_size=8, shuffle=True)


def test_a_dataloader_resumes_in_the_middle_of_an_epoch_bit_for_bit() -> None:
    def train(keeper: Memory) -> dict[str, Tensor]:
        model = cases.build("conv")
        fit(model, loader(), PgdTraining(steps=1), Harp(Weights(model), keep=0.2), epochs=3, lr=0.1, keeper=keeper)
        return model.state_dict()

    expected = train(Memory())
    keeper = Memory(stop_after=5)
    with pytest.raises(InterruptedError):
        train(keeper)
    resumed = train(Memory(state=keeper.state))
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def order(batches: EpochBatches, epoch: int, start: int = 0) -> list[int]:
    """Which images come, by their brightness."""
    return [int(value) for x, _ in batches(epoch, start) for value in x.flatten(1).min(1).values]


class Plain(Dataset[tuple[Tensor, int]]):
    """Images whose pixels are their number."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1, 1, 1), float(index)), 0


@dataclass
class Fabrics:
    """The engine in one of several processes: its loaders count epochs from the start of the process."""

    global_rank: int = 0
    world_size: int = 1

    def setup_dataloaders(self, loader: DataLoader[Any], move_to_device: bool) -> Any:
        sampler = DistributedSampler[Any](Plain(), self.world_size, self.global_rank, shuffle=True)
        return _FabricDataLoader(DataLoader(Plain(), batch_size=4, sampler=sampler))


@pytest.mark.parametrize("world", [1, 2])
def test_the_order_of_a_dataloader_follows_from_seed_and_epoch(world: int) -> None:
    def batches(seed: int, rank: int = 0) -> EpochBatches:
        return by_epoch(DataLoader(Plain(), batch_size=4, shuffle=True), Fabrics(rank, world), seed)

    whole = batches(3)
    first, second = order(whole, 0), order(whole, 1)
    assert first != second
    assert order(batches(3), 1) == second and order(batches(3), 1, 2) == second[8:], "a process that goes on in epoch 1"
    assert order(batches(4), 0) != first
    assert sorted(number for rank in range(world) for number in order(batches(3, rank), 1)) == list(range(24))


def test_samplers_get_the_epoch() -> None:
    epochs = list[int]()

    class Told(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    batches = by_epoch(DataLoader(Plain(), sampler=Told(Plain())), Fabrics(), 0)
    list(batches(0))
    list(batches(5, 2))
    assert epochs == [0, 5]


def test_the_best_ready_epoch_is_left_in_the_model_and_in_the_pruner() -> None:
    values = iter([0.9, 0.2, 0.7, 0.7, 0.1])
    model = cases.build("conv")
    pruner = Hydra(Weights(model), keep=0.1)
    seen: list[dict[str, Tensor]] = []
    masks: list[dict[str, Tensor]] = []

    def validate() -> dict[str, float]:
        masks.append(pruner.masks())
        assert sum(int(w.count_nonzero()) for w in pruner.units.weights) <= pruner.total, (
            "the validated weights meet the budget"
        )
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"robust": next(values)}

    ready = iter([False, True, True, True, True])
    type(pruner).ready = property(lambda self: state["ready"])  # type: ignore[assignment]
    state = {"ready": False}
    original = pruner.after_epoch
    pruner.after_epoch = lambda: (original(), state.update(ready=next(ready)))[0]  # type: ignore[method-assign]
    try:
        fitted = fit(model, Three(), Natural(), pruner, epochs=5, lr=3.0, validate=validate, select="robust")
    finally:
        del type(pruner).ready
    assert fitted.epoch == 4, "the first was not ready; of equal ones the later"
    assert all(torch.equal(value, seen[3][name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(mask, masks[4][name]) for name, mask in masks[3].items()), "else nothing was chosen"
    assert fitted.masks.keys() == masks[3].keys()
    assert all(torch.equal(mask, masks[3][name]) for name, mask in fitted.masks.items())
    assert all(torch.equal(mask, masks[3][name]) for name, mask in pruner.masks().items())
    assert [record["robust"] for record in fitted.history] == [0.9, 0.2, 0.7, 0.7, 0.1]


def test_without_selection_the_last_epoch_stays() -> None:
    model = cases.build("conv")
    fitted = fit(model, Three(), Natural(), Dense(Weights(model)), epochs=2, lr=0.1, validate=lambda: {"robust": 0.5})
    assert fitted.epoch == 2
    with pytest.raises(RecipeError, match="can't select by 'other'"):
        fit(
            model, Three(), Natural(), Dense(Weights(model)), epochs=1, validate=lambda: {"robust": 0.5}, select="other"
        )


def test_a_budget_missed_in_training_is_met_at_the_end_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = cases.build("conv")
    pruner = Harp(Weights(model), keep=0.02, published=True, gamma_step=1e-6)
    fitted = fit(model, Three(), Natural(), pruner, epochs=1, lr=0.1)
    assert sum(int(mask.sum()) for mask in fitted.masks.values()) == pruner.total
    assert not fitted.met
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith("The budget was not met in training (exceeded by ")
    assert f"{100 * fitted.history[-1]['budget_loss']:.3g} %" in message and "gamma_step" in message


def test_a_budget_counts_as_met_when_an_epoch_could_be_chosen(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Hydra):
        """Ready in its first epochs only."""

        epochs = 0
        ready = property(lambda self: self.epochs < 2)

        def after_epoch(self) -> None:
            self.epochs += 1

    def trained(**options: Any) -> bool:
        model = cases.build("conv")
        return fit(model, Three(), Natural(), Late(Weights(model), keep=0.1), lr=0.1, **options).met

    validated = {"validate": lambda: {"robust": 0.5}, "select": "robust"}
    assert trained(epochs=0), "nothing was trained, nothing was missed"
    assert trained(epochs=1) and trained(epochs=3, **validated)
    assert not caplog.records
    assert not trained(epochs=3), "without a choice the last epoch is what counts"
    assert len(caplog.records) == 1 and "exceeded" not in caplog.text, "the excess is reported only if it is known"


def test_divergence_stops_with_advice() -> None:
    model = cases.build("tied")
    with pytest.raises(
        Diverged, match=r"became (nan|inf|NaN or infinite) in epoch \d+, step \d+, at learning rate \S+: try"
    ):
        fit(model, Three(), Natural(), Dense(Weights(model)), epochs=60, lr=1e6, schedule=constant)


class Batches:
    """One batch of given data."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return 1

    def __call__(self, epoch: int, start: int = 0) -> Any:
        return [(self.x, self.y)]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.rand(4, 3, 8, 8) * 255, torch.arange(4), r"\[0, 1\]"),
        (torch.rand(4, 3, 8, 8) - 0.5, torch.arange(4), r"\[0, 1\]"),
        ((torch.rand(4, 3, 8, 8) * 255).int(), torch.arange(4), "not torch.int32"),
        (torch.full((4, 3, 8, 8), torch.nan), torch.arange(4), "(?i)nan|finite"),
        (torch.rand(4, 3, 8, 8).index_fill(0, torch.tensor([1]), torch.inf), torch.arange(4), "inf"),
        (torch.rand(0, 3, 8, 8), torch.arange(0), "^0 images with labels of torch.int64, expected at least one image"),
        (torch.rand(4, 3, 8, 8), torch.arange(3), "one integer label for each of 4 images"),
        (torch.rand(4, 3, 8, 8), torch.arange(4.0), "integer label .* torch.float32"),
        (torch.rand(4, 3, 8, 8), torch.arange(4) > 1, "labels of torch.bool, expected .* integer labels"),
        (torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 4]), "^label 4, expected 0 to 3: the model has 4 outputs"),
        (torch.rand(4, 3, 8, 8), torch.tensor([0, 1, -1, 2]), "^label -1, expected 0 to 3"),
    ],
)
def test_a_batch_that_is_no_images_and_labels_is_refused(x: Tensor, y: Tensor, message: str) -> None:
    model = cases.build("conv")
    with pytest.raises(DataError, match=message):
        fit(model, Batches(x, y), Natural(), Dense(Weights(model)), epochs=1)


def test_batches_without_a_length_are_refused() -> None:
    model = cases.build("conv")
    with pytest.raises(RecipeError, match="no length"):
        fit(model, (cases.batch() for _ in range(3)), Natural(), Dense(Weights(model)), epochs=1)


def test_quotas_have_their_own_parameter_group() -> None:
    model = cases.build("conv")
    pruner = Harp(Weights(model), keep=0.1, published=True, quota_lr=0.5, quota_momentum=0.0, quota_weight_decay=0.0)
    seen = []

    def optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-4)
        seen.append(sgd)
        return sgd

    fit(model, Three(), Natural(), pruner, epochs=1, optimizer=optimizer, schedule=constant)
    first, second = seen[0].param_groups
    assert (first["lr"], first["momentum"]) == (0.1, 0.9)
    assert (second["lr"], second["momentum"], second["weight_decay"]) == (0.5, 0.0, 0.0)
    assert len(second["params"]) == 1


def test_fit_does_not_change_the_callers_random_state() -> None:
    model = cases.build("conv")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    fit(model, Three(), PgdTraining(steps=1), Dense(Weights(model)), epochs=1, lr=0.1)
    assert torch.equal(torch.rand(3), expected)


def test_every_step_draws_other_random_numbers() -> None:
    """Those of torch, which dropout takes, and those that processes share, which attacks take."""

    def drawn(seed: int) -> list[tuple[float, float]]:
        numbers = []

        def objective(model: nn.Module, x: Tensor, y: Tensor, forward: nn.Module) -> Tensor:
            numbers.append((float(torch.rand(())), float(shared_noise.uniform(torch.zeros(1)))))
            return nn.functional.cross_entropy(forward(x), y)

        model = cases.build("conv")
        fit(model, Three(), objective, Dense(Weights(model)), epochs=2, lr=0.1, seed=seed)
        return numbers

    first = drawn(0)
    for kind in zip(*first, *drawn(1), strict=True):
        assert len(set(kind)) == 12, "two seeds, two epochs, three steps"
    assert drawn(0) == first


@pytest.mark.parametrize("accumulate", [1, 3, 4, 16, 20])
def test_parts_of_a_batch_give_the_gradient_of_the_whole(accumulate: int) -> None:
    """Sixteen images are no three equal parts: each part counts by its images."""
    model = cases.build("tied").double()
    x, y = cases.batch()
    x = x.double()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss = nn.functional.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    fitted = fit(
        model,
        [(x, y)],
        Natural(),
        Dense(Weights(model)),
        epochs=1,
        lr=0.1,
        weight_decay=0.0,
        schedule=constant,
        accumulate=accumulate,
    )
    assert fitted.history[0]["loss"] == pytest.approx(loss.item(), rel=1e-12)
    for (name, value), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(value.detach(), before[name] - 0.1 * gradient, rtol=0, atol=1e-12)


def test_learning_rate_follows_the_schedule() -> None:
    model = cases.build("conv")
    records = fit(model, Three(), Natural(), Dense(Weights(model)), epochs=4, lr=0.2, schedule=cosine).history
    last_steps = [(epoch + 2 / 3) / 4 for epoch in range(4)]
    assert [record["lr"] for record in records] == pytest.approx([0.2 * cosine(p) for p in last_steps])
    assert cosine(0) == 1 and cosine(1) == pytest.approx(0)


def test_zero_epochs_apply_the_masks_and_nothing_else() -> None:
    model = cases.build("conv")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fitted = fit(model, Three(), Natural(), Magnitude(Weights(model), keep=0.1), epochs=0)
    for name, value in model.state_dict().items():
        expected = before[name] * fitted.masks[name] if name in fitted.masks else before[name]
        assert torch.equal(value, expected)


def test_fine_tuning_under_masks_recovers_the_loss() -> None:
    model = cases.build("conv")
    units = Weights(model)
    pruned = fit(model, Three(), Natural(), Magnitude(units, keep=0.2), epochs=0).masks
    history = fit(model, Three(), Natural(), Fixed(units, pruned), epochs=8, lr=0.1).history
    assert history[-1]["loss"] < history[0]["loss"]
    assert all(not parameter[~pruned[name]].any() for name, parameter in model.named_parameters() if name in pruned)


@pytest.mark.parametrize("options", [{"epochs": -1}, {"epochs": 1, "accumulate": 0}])
def test_invalid_numbers_of_epochs_and_parts_are_refused(options: dict[str, int]) -> None:
    model = cases.build("conv")
    with pytest.raises(RecipeError):
        fit(model, Three(), Natural(), Dense(Weights(model)), **options)


def test_bare_module_and_wrapper_get_the_same_gradients() -> None:
    """The attack uses the bare module, the loss the wrapper of Fabric; both have the same parameters."""
    model = cases.build("residual")
    compared = 0

    def objective(bare: nn.Module, x: Tensor, y: Tensor, forward: nn.Module) -> Tensor:
        nonlocal compared
        assert bare is model and forward is not model
        losses = [nn.functional.cross_entropy(run(x), y) for run in (bare, forward)]
        gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
        for expected, gradient in zip(*gradients, strict=True):
            assert expected.any() and torch.equal(gradient, expected)
        compared += 1
        return losses[1]

    fit(model, Three(), objective, Dense(Weights(model)), epochs=1, lr=0.1)
    assert compared == 3


class Averaged(Objective):
    """A loss divided by the running mean of the losses before, so its state changes every later step."""

    replays = 2

    def __init__(self) -> None:
        self.mean, self.last = torch.tensor(1.0), torch.tensor(1.0)

    def begin(self) -> Objective:
        return Averaged()

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Any = None) -> Tensor:
        loss = nn.functional.cross_entropy((forward or model)(x), y)
        self.last = loss.detach()
        return loss / self.mean

    def start_epoch(self) -> None:
        self.mean = self.mean / 2

    def after_backward(self) -> None:
        self.mean = 0.5 * self.mean + 0.5 * self.last

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.mean = state["mean"]


def test_the_state_of_an_objective_is_part_of_a_checkpoint() -> None:
    def train(keeper: Memory) -> dict[str, Tensor]:
        model = cases.build("conv")
        fit(model, Three(), Averaged(), Dense(Weights(model)), epochs=3, lr=0.1, keeper=keeper)
        return model.state_dict()

    expected = train(Memory())
    for after in (1, 3, 5):
        keeper = Memory(stop_after=after)
        with pytest.raises(InterruptedError):
            train(keeper)
        resumed = train(Memory(state=keeper.state))
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_every_hook_of_an_objective_is_called_at_its_place() -> None:
    calls: list[str] = []

    class Recorded(Averaged):
        def begin(self) -> Objective:
            calls.append("begin")
            return self

        def start_epoch(self) -> None:
            calls.append("start_epoch")

        def after_backward(self) -> None:
            calls.append("after_backward")

    model = cases.build("conv")
    fit(model, Three(), Recorded(), Dense(Weights(model)), epochs=2, lr=0.1, accumulate=2)
    assert calls == ["begin", *(["start_epoch"] + ["after_backward"] * 3 * Recorded.replays) * 2]


def test_a_function_with_hooks_is_refused() -> None:
    class Stray:
        replays = 3

        def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Any = None) -> Tensor:
            return nn.functional.cross_entropy((forward or model)(x), y)

    model = cases.build("conv")
    with pytest.raises(ModelError, match=r"Stray has 'replays', so it must be derived from harp\.Objective"):
        fit(model, Three(), Stray(), Dense(Weights(model)), epochs=1)


def test_a_state_of_another_version_is_refused() -> None:
    model, keeper = cases.build("conv"), Memory()
    keeper.save({"epoch": 0, "step": 0, "loss_sum": 0.0})
    with pytest.raises(CheckpointError, match="'seconds', another version wrote it: delete it"):
        fit(model, [cases.batch()], Natural(), Dense(Weights(model)), epochs=1, keeper=keeper)


def test_trackers_take_the_records_as_they_are() -> None:
    """By the one-liners of docs/how-to/trainers.md; MLflow wants a number under each name, and a step."""
    logged: list[tuple[int, dict[str, float]]] = []

    class Mlflow:
        @staticmethod
        def log_metrics(metrics: dict[str, float], step: int) -> None:
            logged.append((step, {name: float(value) for name, value in metrics.items()}))

    names = {"mlflow": Mlflow, "wandb": type("Wandb", (), {"log": lambda record: Mlflow.log_metrics(record, 0)})}
    lines = re.findall(r"on_epoch=(.+)\)$", blocks("docs/how-to/trainers.md", "text")[0], re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        model = cases.build("conv")
        pruner, batches = Harp(Weights(model), 0.1), [cases.batch(seed=1)]
        fit(model, batches, Natural(), pruner, epochs=2, validate=lambda: {"val": 0.5}, on_epoch=eval(line, names))
    assert [step for step, _ in logged] == [0, 0, 1, 2]
    assert all({"loss", "lr", "val", "budget_loss"} <= set(numbers) for _, numbers in logged)
