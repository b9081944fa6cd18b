"""The training loop. Pre-training, pruning and fine-tuning use the same loop with different pruners."""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from harp.errors import CheckpointError, ModelError, RecipeError
from harp.models.inputs import first_rows, mapped, rows
from harp.models.modes import Logits, evaluating
from harp.pruning.methods import Loss, Plan, Pruner, Takeover, check_optimizer
from harp.pruning.schedules import as_schedule, cosine
from harp.system.distributed import collectives
from harp.system.distributed.fabric import launch
from harp.system.distributed.shared_noise import shared
from harp.system.distributed.sync_batchnorm import Synchronised, share_buffers, synchronising
from harp.system.files import reason
from harp.system.library_progress import of_this_call
from harp.system.notebook import html_table
from harp.system.numbers import per_cent
from harp.system.progress import Quiet
from harp.system.seeds import derive
from harp.training import divergence
from harp.training.arguments import (
    as_images,
    called,
    check_batches,
    check_count,
    check_length,
    check_pruner,
    check_rates,
    check_trained,
    check_validation,
    metrics_of,
)
from harp.training.base import AttackingObjective, Objective, PlainObjective, as_objective
from harp.training.dataloaders import EpochBatches, by_epoch, held_out
from harp.training.divergence import Guard

if TYPE_CHECKING:
    from lightning_fabric import Fabric

logger = logging.getLogger("harp")

Record = dict[str, Any]


class Keeper(Protocol):
    """Saves and loads the state of a training: `harp.Keeper` writes files."""

    def load(self) -> dict[str, Any] | None:
        """The state to resume from, or None."""
        ...

    def due(self, last: bool = False) -> bool:
        """Whether to save now, before the end of the epoch; `last`: validation comes next, which may take long."""
        ...

    def save(self, state: dict[str, Any]) -> None:
        """Save the state; raises `Interrupted` if a stop was requested."""
        ...


@dataclass
class Fitted:
    """The result of a training: the masks, one record an epoch, and the epoch whose weights the model now holds.

    Arguments:
        masks: the pruner's final masks, by parameter name.
        history: the records.
        epoch: the chosen epoch, counted from 1.
        seconds: the time that the training took, including the parts before an interruption.
        met: whether the pruner met the budget in an epoch that could be chosen. The masks meet it in any case.

    Example:
        fitted = harp.fit(model, batches, harp.Natural(), harp.Magnitude(units, keep=0.1), epochs=1)
        print(fitted.epoch, fitted.history[-1]["loss"])
    """

    masks: dict[str, Tensor]
    history: list[Record] = field(default_factory=list)
    epoch: int = 0
    seconds: float = 0.0
    met: bool = True

    def __repr__(self) -> str:
        kept, all_of = (sum(values) for values in zip(*self._counts(), strict=True)) if self.masks else (0, 0)
        share = f" ({per_cent(kept / all_of)})" if all_of else ""
        epochs = "1 epoch" if len(self.history) == 1 else f"{len(self.history)} epochs"
        epochs += f", best epoch {self.epoch}" if len(self.history) > 1 else ""
        return f"Fitted(kept {kept:,} of {all_of:,}{share}, {epochs}{'' if self.met else ', budget not met'})"

    def _counts(self) -> list[tuple[int, int]]:
        return [(int(mask.count_nonzero()), mask.numel()) for mask in self.masks.values()]

    def _repr_html_(self) -> str:
        keys = [key for key in ("loss", "natural", "robust") if any(key in record for record in self.history)]
        last = len(self.history)
        shown = dict.fromkeys(number for number in (1, self.epoch, last) if 0 < number <= last)
        rows = [
            [f"{number}{' (chosen)' if number == self.epoch else ''}", *(self._cell(number, key) for key in keys)]
            for number in shown
        ]
        return html_table(repr(self), ("epoch", *keys), rows)

    def _cell(self, number: int, key: str) -> str:
        value = self.history[number - 1].get(key)
        return "–" if value is None else f"{value:.3f}" if key == "loss" else f"{value:.1%}"


def fit(
    model: nn.Module,
    batches: EpochBatches | Iterable[Any],
    objective: Objective | Loss,
    pruner: Pruner,
    *,
    epochs: int,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | Optimizer | None = None,
    schedule: Callable[[float], float] | str = cosine,
    accumulate: int = 1,
    seed: int = 0,
    validate: Callable[[], Mapping[str, float]] | EpochBatches | Iterable[Any] | None = None,
    select: str | None = None,
    on_step: Callable[[Record], None] | None = None,
    on_epoch: Callable[[Record], None] | None = None,
    keeper: Keeper | None = None,
    sync_norms: bool = True,
    fabric: "Fabric | None" = None,
) -> Fitted:
    """Train `model` under `objective`, with weights that `pruner` decides, and leave the final weights in the model.

    Arguments:
        model: any `nn.Module`; it holds the final weights at the end.
        batches: callable by epoch, or an iterable that can be iterated again, such as a DataLoader: of pairs (x, y), or
            of whatever the objective can `split`.
        objective: what is minimised: `harp.PgdTraining()`, another `harp.Objective`, or a function `(model, x, y,
            forward=None) -> loss` that calls `forward` instead of the model if it is not None.
        pruner: decides the weights: a method such as `harp.Harp(units, keep=0.01)`, `harp.Dense` or `harp.Fixed`.
        epochs: the number of passes over all batches.
        lr, momentum, weight_decay: of the default optimiser; a method gets them in its `harp.Plan`.
        optimizer: a function that makes the optimiser from parameter groups, or an optimiser of the model, whose
            settings are used and which is given back as it was; default SGD with `lr`, `momentum`, `weight_decay`.
        schedule: the factor of the learning rate as a function of progress from 0 to 1, or the name of one, such as
            "constant".
        accumulate: the number of parts that each batch is split into, to save memory.
        seed: every step's randomness derives from (seed, epoch, step, rank), a DataLoader's order from (seed, epoch).
        validate: held-out batches, on which the objective measures at the end of each epoch, with the final weights in
            the model; or a function that returns metrics, called in every process. The processes may share its work;
            the metrics of the first are used.
        select: the metric that chooses the epoch to keep, among those in which the pruner is ready; None: the last
            epoch.
        sync_norms: with several processes, let batch norms use the statistics of the images of all processes.
        fabric: a launched `lightning_fabric.Fabric`; default one process on the best device.
        on_step, on_epoch: called with a record of numbers after each step and each epoch. Without `on_step`, a
            training of more than two seconds shows its progress on a terminal and in a notebook.
        keeper: saves the state and resumes from it, such as `harp.Keeper`.

    Example:
        units = harp.Weights(model)
        pruner = harp.Harp(units, keep=0.1)
        fitted = harp.fit(model, batches, harp.PgdTraining(steps=1), pruner, epochs=1, lr=0.1)
        harp.fit(model, batches, harp.PgdTraining(steps=1), harp.Fixed(units, fitted.masks), epochs=1, lr=0.01)
    """
    check_pruner(pruner, model)
    check_length(epochs, accumulate)
    check_rates(lr, momentum, weight_decay)
    check_validation(validate, select)
    check_batches(batches)
    task, shape = as_objective(objective).begin(), as_schedule(schedule)
    if isinstance(optimizer, Optimizer):
        check_optimizer(optimizer, pruner.units.model)
        own = optimizer.param_groups[0]
        lr, momentum = own["lr"], own.get("momentum", momentum)
        weight_decay = own.get("weight_decay", weight_decay)
    fabric = launch() if fabric is None else fabric
    source = by_epoch(batches, fabric, seed)
    check_count(len(source), epochs)
    pruner.to(fabric.device)
    model.to(fabric.device)
    plan = Plan(epochs, max(1, len(source)) * task.replays, lr, momentum, weight_decay, shape)
    taken: Takeover | None = None
    try:
        frozen = not any(parameter.requires_grad for parameter in model.parameters())
        groups = pruner.trainable()
        check_trained(groups, frozen)
        if isinstance(optimizer, Optimizer):
            taken, made = Takeover(optimizer, groups, pruner.units.model), optimizer
        elif optimizer is None:
            made = SGD(groups, lr=lr, momentum=momentum, weight_decay=weight_decay)
        else:
            made = called(optimizer)(groups)
        training = _Training(fabric, model, pruner, task, source, made, plan, accumulate, seed, sync_norms)
        with torch.random.fork_rng(_cuda_devices(fabric)):
            training.run(training.validation(validate, select), select, on_step, on_epoch, keeper)
        return training.close()
    finally:
        pruner.release()  # also of a training that was stopped: the model can be trained again
        if taken is not None:
            taken.give_back(scheduled=False)


class _Training:
    """One call of `fit`: the state that a checkpoint holds, and the steps of the loop."""

    def __init__(
        self,
        fabric: "Fabric",
        model: nn.Module,
        pruner: Pruner,
        objective: Objective,
        batches: EpochBatches,
        optimizer: Optimizer,
        plan: Plan,
        accumulate: int,
        seed: int,
        sync_norms: bool,
    ) -> None:
        self.fabric, self.model, self.pruner = fabric, model, pruner
        self.batches, self.plan, self.accumulate, self.seed = batches, plan, accumulate, seed
        self.objective = objective
        self.loss = pruner.wrap(objective.function if isinstance(objective, PlainObjective) else objective)
        pruner.bind(optimizer)
        self.forward, self.optimizer = fabric.setup(model, optimizer)  # data parallelism and precision, only here
        self.sync_norms = sync_norms and fabric.world_size > 1
        dense_forward = Synchronised(self.forward) if self.sync_norms else self.forward
        self.loss_forward = _on_sparse_engine(model, dense_forward, pruner.lasting(), fabric.device)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        names = {id(tensor): name for name, tensor in (*pruner.named_parameters(), *model.named_parameters())}
        trained = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        latents = {names.get(id(tensor), f"parameter {n}"): tensor for n, tensor in enumerate(trained)}
        self.guard = Guard(latents, fabric)
        tensors = {**latents, **dict(model.named_parameters()), **dict(model.named_buffers())}
        not_finite = divergence.unfinite(tensors)  # from the start, such as a mask of infinities in a buffer
        self.weights = {name: tensor for name, tensor in tensors.items() if name not in not_finite}
        self.epoch = self.step = 0
        self.loss_sum = 0.0
        self.seconds_before, self.started = 0.0, time.monotonic()  # the former: before an interruption
        self.history: list[Record] = []
        self.best: dict[str, Any] | None = None  # the chosen epoch: its number, metric and states

    def run(
        self,
        validate: Callable[[], Mapping[str, float]] | None,
        select: str | None,
        on_step: Callable[[Record], None] | None,
        on_epoch: Callable[[Record], None] | None,
        keeper: Keeper | None,
    ) -> None:
        """Run all epochs, from the keeper's state if there is one."""
        self.begin(keeper)
        # Who is called after every step shows the progress, or doesn't.
        display = of_this_call() if on_step is None and self.fabric.is_global_zero else Quiet()
        with display.training(type(self.pruner).__name__, self.plan.epochs, len(self.batches), self.epoch):
            self.run_epochs(display, validate, select, on_step, on_epoch, keeper)

    def run_epochs(
        self,
        display: Quiet,
        validate: Callable[[], Mapping[str, float]] | None,
        select: str | None,
        on_step: Callable[[Record], None] | None,
        on_epoch: Callable[[Record], None] | None,
        keeper: Keeper | None,
    ) -> None:
        """Run the epochs that are left."""
        while self.epoch < self.plan.epochs:
            self.forward.train()
            if self.step == 0:
                self.objective.start_epoch()
            for batch in self.batches(self.epoch, self.step):
                loss = self.train_step(batch)
                display.step({"epoch": self.epoch, "step": self.step, "loss": loss})
                if on_step:
                    on_step({"epoch": self.epoch, "step": self.step, "loss": loss, **self.pruner.metrics()})
                if keeper is not None and keeper.due(self.step == len(self.batches)):
                    keeper.save(self.state())
            record = self.end_epoch(validate, select)
            display.epoch(record)
            if on_epoch:  # before the state is saved: if the process ends here, the epoch is logged twice, not never
                on_epoch(record)
            if keeper is not None:
                keeper.save(self.state())

    def validation(self, validate: Any, select: str | None) -> Callable[[], Mapping[str, float]] | None:
        """What validates an epoch: the function that was given, or the objective on held-out batches."""
        if validate is None or (callable(validate) and not hasattr(validate, "__len__")):
            return validate  # type: ignore[no-any-return]
        if type(self.objective).measure is Objective.measure:
            problem = "the objective does not say what it measures on held-out batches (`harp.Objective.measure`)"
            if select is not None:
                raise RecipeError(f"can't select an epoch by {select!r}: {problem}")
            logger.warning("not validated, and the last epoch is kept: %s", problem)
            return None
        return partial(self.measured, held_out(validate, self.seed))

    def measured(self, batches: EpochBatches) -> dict[str, float]:
        """What the objective measures on held-out batches: the mean over their examples."""
        sums, total = dict[str, float](), 0
        with evaluating(self.model), torch.no_grad():
            for batch in batches(0):
                x, y = self.inputs(batch)
                count = rows(x) or 1  # a batch whose tensors have different lengths counts once
                total += count
                for name, value in self.objective.measure(self.model, x, y).items():
                    sums[name] = sums.get(name, 0.0) + count * float(value)
        return {name: value / total for name, value in sums.items()}

    def begin(self, keeper: Keeper | None) -> None:
        """Load the keeper's state if there is one, and start; every rank takes rank 0's latents and buffers."""
        state = keeper.load() if keeper is not None else None
        if state is not None:
            try:
                self.load(state)
            except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:  # torch raises all of them
                problem = f"is of another model, pruner or optimiser ({reason(error)})"
                if isinstance(error, KeyError):
                    problem = f"has no {error}, another version wrote it"
                raise CheckpointError(f"the saved state {problem}: delete it to start the stage anew") from error
        if self.fabric.world_size > 1:
            for tensor in [*self.pruner.parameters(), *self.pruner.buffers()]:
                torch.distributed.broadcast(tensor.data, 0)
            share_buffers(self.model)
        self.model.zero_grad()  # an earlier training may have left gradients that the optimiser does not clear
        self.pruner.start(self.plan)

    def inputs(self, batch: Any) -> tuple[Any, Any]:
        """The inputs and the targets of a batch, on the device."""
        x, y = self.objective.split(self.fabric.to_device(batch))
        return as_images(x, y, self.model) if isinstance(self.objective, AttackingObjective) else (x, y)

    def train_step(self, batch: Any) -> float:
        """Train on a batch, with one update for each replay of the objective; return the last loss."""
        x, y = self.inputs(batch)
        if self.step == 0 and self.epoch == 0:
            with torch.no_grad():
                self.objective.check(self.model, x, y)
        if self.pruner.example is None:
            self.pruner.example = first_rows(x, 1)
        replays = self.objective.replays
        for replay in range(replays):
            loss = self.update(x, y, self.step * replays + replay)
        self.step += 1
        return loss

    def update(self, x: Any, y: Any, number: int) -> float:
        """One optimiser step: loss, gradients pulled back to the latents, step, weights written."""
        rank, world = self.fabric.global_rank, self.fabric.world_size
        torch.manual_seed(derive(self.seed, "rank", self.epoch, number, rank))
        factor = self.plan.shape((self.epoch + number / self.plan.steps) / self.plan.epochs)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad()
        with shared(derive(self.seed, "step", self.epoch, number, 0), rank, world):
            loss = self.backward(x, y)
        self.objective.after_backward()
        self.pruner.after_backward()
        self.guard.watch(loss, self.position(self.step + 1))
        self.optimizer.step()
        self.pruner.after_step()
        if world > 1:  # buffers that differ between processes would change attacks, and would be lost on resume
            share_buffers(self.model)
        self.loss_sum += loss
        return loss

    def backward(self, x: Any, y: Any) -> float:
        """Compute the gradients of the batch's mean loss, in parts; ranks exchange them with the last part only."""
        total = 0.0
        parts = self.parts(x, y)
        for number, (inputs, targets, share) in enumerate(parts, 1):
            with self.fabric.no_backward_sync(self.forward, enabled=number < len(parts)):
                with self.fabric.autocast(), synchronising(self.sync_norms):
                    loss = self.loss(self.model, inputs, targets, forward=self.loss_forward)
                    _check_loss(loss)
                    loss = loss * share
                if loss.requires_grad:  # not if a method only measures and trains nothing
                    self.fabric.backward(loss)
            total += float(loss.detach())
        if self.fabric.world_size > 1:  # the wrapped model does not average the gradients of the pruner's latents
            for latent in self.pruner.parameters():
                if latent.grad is not None:
                    torch.distributed.all_reduce(latent.grad)
                    latent.grad /= self.fabric.world_size
        return total

    def parts(self, x: Any, y: Any) -> list[tuple[Any, Any, float]]:
        """A batch in `accumulate` parts, each with its share of the examples."""
        if self.accumulate == 1:
            return [(x, y, 1.0)]
        count = rows((x, y))
        if not count:
            raise RecipeError(
                f"accumulate {self.accumulate} splits batches whose tensors have a row for each example, and these "
                "have different lengths: give 1"
            )
        size = -(-count // self.accumulate)
        pieces = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        cut = [mapped(itemgetter(piece), (x, y)) for piece in pieces]
        return [(*part, (piece.stop - piece.start) / count) for part, piece in zip(cut, pieces, strict=True)]

    def end_epoch(self, validate: Callable[[], Mapping[str, float]] | None, select: str | None) -> Record:
        """Validate the weights of this epoch, keep them if they are the best, and go to the next epoch."""
        self.guard.check()
        self.check_agreement()
        updates = max(1, self.step * self.objective.replays)
        record: Record = {"epoch": self.epoch + 1, "loss": collectives.mean(self.fabric, self.loss_sum) / updates}
        record |= {"lr": self.optimizer.param_groups[0]["lr"], **self.pruner.metrics()}
        self.pruner.after_epoch()
        record["ready"] = self.pruner.ready
        if validate is not None:
            torch.manual_seed(derive(self.seed, "validate", self.epoch))
            with self.pruner.exact():
                record |= self.fabric.broadcast(metrics_of(validate()))
                self.keep_if_best(record, select)
        self.pruner.observe(record)
        self.epoch, self.step, self.loss_sum = self.epoch + 1, 0, 0.0
        self.history.append(record)
        return record

    def keep_if_best(self, record: Record, select: str | None) -> None:
        """Keep the epoch with the highest metric; of equal ones the later."""
        if select is None or not self.pruner.ready:
            return
        if select not in record:
            raise RecipeError(f"can't select by {select!r}: validation measured {', '.join(record)}")
        if self.best is None or record[select] >= self.best["value"]:
            state = {"model": self.model.state_dict(), "pruner": self.pruner.state_dict()}
            self.best = {"value": record[select], "epoch": record["epoch"], **copy.deepcopy(state)}

    def check_agreement(self) -> None:
        """Raise an error if processes hold different weights or masks."""
        if self.fabric.world_size == 1:
            return
        process = collectives.first_different_rank(
            self.fabric, (*self.model.parameters(), *self.pruner.masks().values())
        )
        if process is not None:
            raise ModelError(
                f"after epoch {self.epoch + 1} process {process} holds other weights or masks than process 0: is the "
                "same version of everything installed on all machines?"
            )

    def seconds(self) -> float:
        """The time that this training has taken so far."""
        return self.seconds_before + time.monotonic() - self.started

    def position(self, step: int) -> str:
        """The position in the training, for messages."""
        return f"epoch {self.epoch + 1}, step {step}, at learning rate {self.optimizer.param_groups[0]['lr']:g}"

    def state(self) -> dict[str, Any]:
        """The state to save: all that the rest of the training depends on."""
        self.guard.check()
        divergence.check_weights(self.weights, self.position(self.step))  # a bad state must not replace a good one
        noise, objective_state = self.objective.noise, self.objective.state()
        return {
            "epoch": self.epoch,
            "step": self.step,
            "loss_sum": collectives.mean(self.fabric, self.loss_sum),
            "noise": None if noise is None else collectives.whole(self.fabric, noise),
            "seconds": self.seconds(),
            "history": self.history,
            "best": self.best,
            "model": self.model.state_dict(),
            "pruner": self.pruner.state_dict(),
            "example": self.pruner.example,
            "optimizer": self.optimizer.state_dict(),
            **({"objective": objective_state} if objective_state else {}),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load a saved state."""
        self.epoch, self.step, self.loss_sum = state["epoch"], state["step"], state["loss_sum"]
        self.seconds_before = state["seconds"]
        if state["noise"] is not None:
            self.objective.noise = collectives.own(self.fabric, state["noise"])
        if "objective" in state:
            self.objective.load_state(state["objective"])
        self.history, self.best = state["history"], state["best"]
        self.model.load_state_dict(state["model"])
        self.pruner.load_state_dict(state["pruner"])
        if self.pruner.example is None:
            self.pruner.example = state.get("example")  # after the last step no batch will supply one
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> Fitted:
        """Leave the chosen epoch's weights in the model, and return the result."""
        epoch = self.epoch
        if self.best is not None:
            epoch = self.best["epoch"]
            self.model.load_state_dict(self.best["model"])
            self.pruner.load_state_dict(self.best["pruner"])
        met = self.best is not None or not self.history or self.pruner.ready
        if not met:
            logger.warning(budget_warning(self.history))
        return Fitted(self.pruner.finish(), self.history, epoch, self.seconds(), met)


def _check_loss(loss: Any) -> None:
    """Refuse what is no loss: dictionaries of losses, one loss for each example, ..."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return
    given = (
        f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    )
    raise ModelError(f"the objective returned {given}, expected the loss of the batch: one floating-point number")


def budget_warning(history: Sequence[Record], stage: str | None = None) -> str:
    """A warning that the pruner did not meet the budget: by how much, what was done, what to try."""
    place = "in training" if stage is None else f"in stage {stage}"
    loss = history[-1].get("budget_loss") if history else None
    excess = f" (exceeded by {100 * loss:.3g} % at the end)" if loss else ""
    return (
        f"The budget was not met {place}{excess}, so the masks were cut to it after the last epoch (HARP's: at LAMP's "
        "rates, not at the learned ones); train for more epochs, keep more, or let the budget weigh more (HARP: a "
        "larger gamma_step, or without `published`)."
    )


def _on_sparse_engine(
    model: nn.Module, forward: Logits, masks: Mapping[str, Tensor] | None, device: torch.device
) -> Logits:
    """The forward pass with sparse layers on the sparse engine, which is for CPUs and is loaded only on these."""
    if device.type != "cpu":
        return forward
    from harp.engine.sparse_training import SparseForward

    return SparseForward(model, forward, masks)


def _cuda_devices(fabric: "Fabric") -> list[int]:
    return [fabric.device.index or 0] if fabric.device.type == "cuda" else []
