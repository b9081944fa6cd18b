"""The one training loop: pre-training, pruning and fine-tuning differ in the pruner only."""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from harp import finite
from harp.data import check_batch
from harp.errors import CheckpointError, ModelError, RecipeError
from harp.files import reason
from harp.finite import Guard
from harp.free import Free
from harp.frozen import frozen
from harp.loaders import EpochBatches, by_epoch
from harp.processes import ranks
from harp.processes.engine import launch
from harp.processes.noise import shared
from harp.processes.synchronise import Synchronised, share_buffers, synchronising
from harp.pruners.base import Objective, Plan, Pruner
from harp.schedules import cosine
from harp.seeds import derive
from harp.sparse.training import SparseForward

logger = logging.getLogger("harp")

Record = dict[str, Any]


class Keeper(Protocol):
    """Where a training keeps its state: `harp.keeper.Keeper` writes files."""

    def load(self) -> dict[str, Any] | None:
        """The state to go on from."""
        ...

    def due(self, last: bool = False) -> bool:
        """Whether to save before the end of an epoch; after its last step validation comes, which may take long."""
        ...

    def save(self, state: dict[str, Any]) -> None:
        """Keep the state; raises `Interrupted` when somebody asked to stop."""
        ...


@dataclass
class Fitted:
    """What a training leaves: the masks, one record an epoch, and the epoch whose weights the model now holds."""

    masks: dict[str, Tensor]
    history: list[Record] = field(default_factory=list)
    epoch: int = 0
    seconds: float = 0.0  # of all its parts, if it was interrupted
    met: bool = True  # whether the pruner met the budget in an epoch that could be chosen; the masks meet it anyway


def fit(
    model: nn.Module,
    batches: EpochBatches | Iterable[tuple[Tensor, Tensor]],
    objective: Objective,
    pruner: Pruner,
    *,
    epochs: int,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
    schedule: Callable[[float], float] = cosine,
    accumulate: int = 1,
    seed: int = 0,
    validate: Callable[[], Mapping[str, float]] | None = None,
    select: str | None = None,
    on_step: Callable[[Record], None] | None = None,
    on_epoch: Callable[[Record], None] | None = None,
    keeper: Keeper | None = None,
    sync_norms: bool = True,
    fabric: Any = None,
) -> Fitted:
    """Train `model` under `objective`, its weights decided by `pruner`, and leave the answer in the model.

    Arguments:
        batches: callable by epoch, or anything that gives (x, y) pairs each time it is iterated, such as a DataLoader.
        optimizer: makes the optimiser from parameter groups; default SGD with `lr`, `momentum`, `weight_decay`.
        schedule: the learning rate's factor as a function of progress from 0 to 1.
        accumulate: parts that each batch is split into, to save memory.
        seed: every step's randomness derives from (seed, epoch, step, rank), a DataLoader's order from (seed, epoch).
        validate: called at the end of each epoch with the answer's weights in the model, in every process, which may
            share the work; returns metrics, of which the first process's count.
        select: the metric whose best epoch (the pruner being ready) is left in the model; None: the last epoch.
        sync_norms: with several processes, let batch norms take the statistics of all their images together.
        fabric: a launched `lightning_fabric.Fabric`; default one process on the best device.
    """
    if epochs < 0 or accumulate < 1:
        raise RecipeError(f"epochs {epochs}, accumulate {accumulate}: give at least 0 and 1")
    fabric = launch() if fabric is None else fabric
    source = by_epoch(batches, fabric, seed)
    pruner.to(fabric.device)
    model.to(fabric.device)
    groups = pruner.trainable()
    make = optimizer or (lambda gs: SGD(gs, lr=lr, momentum=momentum, weight_decay=weight_decay))
    replays: int = getattr(objective, "replays", 1)
    plan = Plan(epochs, max(1, len(source)) * replays, lr, momentum, weight_decay, schedule)
    training = _Training(fabric, model, pruner, objective, source, make(groups), plan, accumulate, seed, sync_norms)
    with torch.random.fork_rng(_cuda_devices(fabric)):
        training.run(validate, select, on_step, on_epoch, keeper)
    return training.close()


class _Training:
    """The state of one `fit`: what a checkpoint holds, and the steps over it."""

    def __init__(
        self,
        fabric: Any,
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
        begin: Callable[[], Free] | None = getattr(objective, "begin", None)
        self.free = None if begin is None else begin()
        self.objective = pruner.wrap(objective if self.free is None else self.free)
        self.replays: int = getattr(objective, "replays", 1)
        pruner.bind(optimizer)
        self.forward, self.optimizer = fabric.setup(model, optimizer)  # data parallelism and precision, only here
        self.sync_norms = sync_norms and fabric.world_size > 1
        passing = Synchronised(self.forward) if self.sync_norms else self.forward
        self.sparsely = SparseForward(model, passing, pruner.lasting())
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        names = {id(tensor): name for name, tensor in (*pruner.named_parameters(), *model.named_parameters())}
        trained = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        latents = {names.get(id(tensor), f"parameter {n}"): tensor for n, tensor in enumerate(trained)}
        self.guard = Guard(latents, fabric)
        kept = {**latents, **dict(model.named_parameters()), **dict(model.named_buffers())}
        endless = finite.unfinite(kept)  # such as a buffer that masks by infinities
        self.weights = {name: tensor for name, tensor in kept.items() if name not in endless}
        self.epoch = self.step = 0
        self.loss_sum = 0.0
        self.before, self.began = 0.0, time.monotonic()  # seconds spent before an interruption; since then
        self.history: list[Record] = []
        self.best: dict[str, Any] | None = None

    def run(
        self,
        validate: Callable[[], Mapping[str, float]] | None,
        select: str | None,
        on_step: Callable[[Record], None] | None,
        on_epoch: Callable[[Record], None] | None,
        keeper: Keeper | None,
    ) -> None:
        """Go through all epochs, from where the keeper's state stands."""
        self.begin(keeper)
        while self.epoch < self.plan.epochs:
            self.forward.train()
            if self.free is not None and self.step == 0:
                self.free.start_epoch()
            for x, y in self.batches(self.epoch, self.step):
                loss = self.train_step(x, y)
                if on_step:
                    on_step({"epoch": self.epoch, "step": self.step, "loss": loss, **self.pruner.metrics()})
                if keeper is not None and keeper.due(self.step == len(self.batches)):
                    keeper.save(self.state())
            record = self.end_epoch(validate, select)
            if on_epoch:  # before it counts as done: should the process end here, it is logged again, not left out
                on_epoch(record)
            if keeper is not None:
                keeper.save(self.state())

    def begin(self, keeper: Keeper | None) -> None:
        """Take the keeper's state, or start; every rank from rank 0's latents and buffers."""
        state = keeper.load() if keeper is not None else None
        if state is not None:
            try:
                self.load(state)
            except KeyError as error:
                raise CheckpointError(
                    f"the saved state has no {error}, another version wrote it: delete it to start the stage anew"
                ) from error
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # of torch, over several lines
                raise CheckpointError(
                    f"the saved state is of another model, pruner or optimiser ({reason(error)}): delete it to start "
                    "the stage anew"
                ) from error
        if self.fabric.world_size > 1:
            for tensor in [*self.pruner.parameters(), *self.pruner.buffers()]:
                torch.distributed.broadcast(tensor.data, 0)
            share_buffers(self.model)
        self.model.zero_grad()  # of a training before this one: the optimiser may not have them all
        self.pruner.start(self.plan)

    def train_step(self, x: Tensor, y: Tensor) -> float:
        """Train on a batch: one update, or as many as the objective replays it; return the last loss."""
        x, y = self.fabric.to_device((x, y))
        if self.step == 0 and self.epoch == 0:
            self.check(x, y)
        if self.pruner.example is None:
            self.pruner.example = x[:1].detach()
        for replay in range(self.replays):
            loss = self.update(x, y, self.step * self.replays + replay)
        self.step += 1
        return loss

    def update(self, x: Tensor, y: Tensor, number: int) -> float:
        """One optimiser step: objective, gradients pulled back to the latents, step, weights written."""
        rank, world = self.fabric.global_rank, self.fabric.world_size
        torch.manual_seed(derive(self.seed, "rank", self.epoch, number, rank))
        factor = self.plan.shape((self.epoch + number / self.plan.steps) / self.plan.epochs)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad()
        with shared(derive(self.seed, "step", self.epoch, number, 0), rank, world):
            loss = self.backward(x, y)
        if self.free is not None:
            self.free.after_backward()
        self.pruner.after_backward()
        self.guard.watch(loss, self.where(self.step + 1))
        self.optimizer.step()
        self.pruner.after_step()
        if world > 1:  # what a module keeps of its own part of the batch would change attacks, and be lost on resume
            share_buffers(self.model)
        self.loss_sum += loss
        return loss

    @torch.no_grad()
    def check(self, x: Tensor, y: Tensor) -> None:
        """Refuse data that would train to nonsense: outside [0, 1], or labels without a logit."""
        with frozen(self.model, x[:1], fast=False) as logits:
            check_batch(x, y, logits(x[:1]).shape[-1])

    def backward(self, x: Tensor, y: Tensor) -> float:
        """Gradients of the batch's mean loss, in parts; ranks exchange them with the last part only."""
        total = 0.0
        parts = list(zip(x.chunk(self.accumulate), y.chunk(self.accumulate), strict=True))
        for number, (part, labels) in enumerate(parts, 1):
            with self.fabric.no_backward_sync(self.forward, enabled=number < len(parts)):
                with self.fabric.autocast(), synchronising(self.sync_norms):
                    loss = self.objective(self.model, part, labels, forward=self.sparsely) * (len(part) / len(x))
                if loss.requires_grad:  # a method may only look, and train nothing
                    self.fabric.backward(loss)
            total += float(loss.detach())
        if self.fabric.world_size > 1:  # latents that have gradients of their own are no part of the wrapped model
            for latent in self.pruner.parameters():
                if latent.grad is not None:
                    torch.distributed.all_reduce(latent.grad)
                    latent.grad /= self.fabric.world_size
        return total

    def end_epoch(self, validate: Callable[[], Mapping[str, float]] | None, select: str | None) -> Record:
        """Validate the answer of this epoch, keep it if it is the best, and move on."""
        self.guard.check()
        self.agree()
        updates = max(1, self.step * self.replays)
        record: Record = {"epoch": self.epoch + 1, "loss": ranks.mean(self.fabric, self.loss_sum) / updates}
        record |= {"lr": self.optimizer.param_groups[0]["lr"], **self.pruner.metrics()}
        self.pruner.after_epoch()
        record["ready"] = self.pruner.ready
        if validate is not None:
            torch.manual_seed(derive(self.seed, "validate", self.epoch))
            with self.pruner.exact():
                record |= self.fabric.broadcast(dict(validate()))
                self.keep_if_best(record, select)
        self.pruner.observe(record)
        self.epoch, self.step, self.loss_sum = self.epoch + 1, 0, 0.0
        self.history.append(record)
        return record

    def keep_if_best(self, record: Record, select: str | None) -> None:
        """Remember the epoch with the highest metric; of equal ones the later."""
        if select is None or not self.pruner.ready:
            return
        if select not in record:
            raise RecipeError(f"can't select by {select!r}: validation measured {', '.join(record)}")
        if self.best is None or record[select] >= self.best["value"]:
            state = {"model": self.model.state_dict(), "pruner": self.pruner.state_dict()}
            self.best = {"value": record[select], "epoch": record["epoch"], **copy.deepcopy(state)}

    def agree(self) -> None:
        """Refuse to go on when processes have come to different weights or masks: they would train for nothing."""
        if self.fabric.world_size == 1:
            return
        process = ranks.astray(self.fabric, (*self.model.parameters(), *self.pruner.masks().values()))
        if process is not None:
            raise ModelError(
                f"after epoch {self.epoch + 1} process {process} holds other weights or masks than process 0: is the "
                "same version of everything installed on all machines?"
            )

    def seconds(self) -> float:
        """The time that this training took so far."""
        return self.before + time.monotonic() - self.began

    def where(self, step: int) -> str:
        """The place in the training, for people."""
        return f"epoch {self.epoch + 1}, step {step}, at learning rate {self.optimizer.param_groups[0]['lr']:g}"

    def state(self) -> dict[str, Any]:
        """All that the future depends on."""
        self.guard.check()
        finite.check_weights(self.weights, self.where(self.step))  # what is no good is not put in the place of what is
        noise = None if self.free is None else self.free.noise
        return {
            "epoch": self.epoch,
            "step": self.step,
            "loss_sum": ranks.mean(self.fabric, self.loss_sum),
            "noise": None if noise is None else ranks.whole(self.fabric, noise),
            "seconds": self.seconds(),
            "history": self.history,
            "best": self.best,
            "model": self.model.state_dict(),
            "pruner": self.pruner.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take a state back."""
        self.epoch, self.step, self.loss_sum = state["epoch"], state["step"], state["loss_sum"]
        self.before = state["seconds"]
        if self.free is not None and state["noise"] is not None:
            self.free.noise = ranks.own(self.fabric, state["noise"])
        self.history, self.best = state["history"], state["best"]
        self.model.load_state_dict(state["model"])
        self.pruner.load_state_dict(state["pruner"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> Fitted:
        """Leave the chosen epoch's answer in the model."""
        epoch = self.epoch
        if self.best is not None:
            epoch = self.best["epoch"]
            self.model.load_state_dict(self.best["model"])
            self.pruner.load_state_dict(self.best["pruner"])
        met = self.best is not None or not self.history or self.pruner.ready
        if not met:
            logger.warning(budget_warning(self.history))
        return Fitted(self.pruner.finish(), self.history, epoch, self.seconds(), met)


def budget_warning(history: Sequence[Record], stage: str | None = None) -> str:
    """One sentence on a training whose pruner did not meet the budget: by how much, what was done, what to try."""
    where = "in training" if stage is None else f"in stage {stage}"
    loss = history[-1].get("budget_loss") if history else None
    excess = f" (exceeded by {100 * loss:.3g} % at the end)" if loss else ""
    return (
        f"The budget was not met {where}{excess}, so the masks were cut to it after the last epoch (HARP's: at LAMP's "
        "rates, not at the learned ones); train for more epochs, keep more, or let the budget weigh more (HARP: a "
        "larger gamma_step, or without `published`)."
    )


def _cuda_devices(fabric: Any) -> list[int]:
    return [fabric.device.index or 0] if fabric.device.type == "cuda" else []
