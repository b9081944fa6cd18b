"""The pruner's contract: the model is plain, its parameters always hold the weights in force.

A pruner decides those weights. It writes them when it starts and after every optimiser step, and after every backward
pass it pulls the weights' gradients back to what it learns. So pre-training, pruning and fine-tuning are one loop with
three pruners, and attacks, validation, checkpoints, data parallelism and export see nothing but an ordinary module.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harp.errors import ModelError, RecipeError
from harp.models.modes import Logits
from harp.pruning import masks as mask_ops
from harp.pruning.masks import Masks, top_k
from harp.pruning.papers import Paper, Taxonomy
from harp.pruning.units import Units, exact
from harp.system.seeds import derive

if TYPE_CHECKING:
    from harp.attacks import Attack

ParameterGroup = dict[str, Any]

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Loss(Protocol):
    """A function of a model and a batch that gives the loss: all that an objective must be."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, /, *, forward: Logits | None = None) -> Tensor:
        """The loss of a batch; the pass that it is computed by calls `forward`, the model if that is None."""
        ...


@runtime_checkable
class AttackingLoss(Protocol):
    """A loss whose attacked images can be had apart."""

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images that the loss is computed at."""
        ...


@runtime_checkable
class TwoPartLoss(AttackingLoss, Protocol):
    """A loss in two parts: methods that ask for several losses at the same images attack once."""

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The loss at images and their attacked counterparts."""
        ...


class Objective(ABC):
    """What a training minimises. Only the call is required; each of the other members does nothing by default.

    `harp.fit` also takes a plain function `(model, x, y, forward=None) -> loss`. An objective that keeps something from
    step to step, sees a batch several times or acts after the backward pass derives from this class.

    Example:
        class Smoothed(harp.Objective):
            def __call__(self, model, x, y, forward=None):
                return torch.nn.functional.cross_entropy((forward or model)(x), y, label_smoothing=0.1)
    """

    # What it is, for cards and submissions.
    title: ClassVar[str | None] = None
    paper: ClassVar[Paper | None] = None
    taxonomy: ClassVar[str | None] = None  # its words in the Adversarial Pruning Benchmark

    replays: int = 1  # optimiser steps on each batch

    # What is kept from step to step with one row for each image of this process's batch. It is part of a checkpoint,
    # where the rows of all processes are joined.
    noise: Tensor | None = None

    @abstractmethod
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """The loss of a batch; the pass that it is computed by calls `forward`, the model if that is None."""

    def begin(self) -> "Objective":
        """The objective of one training, called once at its start: a fresh one if it keeps something."""
        return self

    def start_epoch(self) -> None:  # noqa: B027  # a hook
        """Called before the first step of each epoch, but not when an epoch is resumed."""

    def after_backward(self) -> None:  # noqa: B027  # a hook
        """Called once an optimiser step, after the gradients of the whole batch are there."""

    def state(self) -> dict[str, Any]:
        """What else a checkpoint must hold: tensors and plain values, the same in every process."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # a hook
        """Take back what `state` gave."""

    def judge(self) -> "Attack | None":
        """The attack that held-out images are judged by; None: they are judged as they are."""
        return None


class PlainObjective(Objective):
    """An objective that is a function and no more."""

    def __init__(self, function: Loss) -> None:
        self.function = function

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """What the function gives."""
        return self.function(model, x, y, forward=forward)


def as_objective(loss: Objective | Loss) -> Objective:
    """An objective, which a plain function is made into."""
    if isinstance(loss, Objective):
        return loss
    hooks = [name for name in ("begin", "replays", "start_epoch", "after_backward", "noise") if hasattr(loss, name)]
    if hooks:  # it would be ignored
        raise ModelError(f"{type(loss).__name__} has {hooks[0]!r}, so it must be derived from harp.Objective")
    return PlainObjective(loss)


@dataclass(frozen=True)
class Plan:
    """The training that lies ahead, for methods that pace themselves by it.

    Arguments:
        epochs: of the training.
        steps: optimiser steps an epoch.
        lr, momentum, weight_decay: of the optimiser.
        shape: the learning rate's factor as a function of progress from 0 to 1.

    Example:
        plan = harp.Plan(epochs=20, steps=100, lr=0.1)
        harp.Harp(units, keep=0.1).start(plan)
    """

    epochs: int
    steps: int  # optimiser steps an epoch
    lr: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    shape: Callable[[float], float] = lambda progress: 1.0  # learning rate's factor over progress in [0, 1]


@dataclass(frozen=True)
class Phase:
    """A stage as a paper has it; None: as the recipe has it."""

    epochs: int | None = None  # beside 100 epochs of pre-training, HARP's
    lr: float | None = None
    weight_decay: float | None = None
    schedule: str | Mapping[str, Any] | None = None

    def optimizer(self) -> dict[str, Any]:
        """What the paper says of the optimiser."""
        said = {"lr": self.lr, "weight_decay": self.weight_decay, "schedule": self.schedule}
        return {key: value for key, value in said.items() if value is not None}


@dataclass(frozen=True)
class Layout:
    """The stages as a method's paper has them; by default the recipe's, which are HARP's at the paper's scale."""

    pretrain: Phase = Phase()
    prune: Phase = Phase()  # of a method that trains from scratch: its only stage
    finetune: Phase = Phase()
    step: float | None = None  # of the attack that it trains against, relative to ε


class Pruner(nn.Module):
    """Leave the weights alone: dense training. Also the base of every method.

    A method's constructor takes `units`, then what are its options in a recipe; `total` is the integer budget in the
    units' own measure. One that draws at random takes a `seed` too, which a recipe supplies.

    Arguments:
        units: what may be pruned: `harp.Weights` or `harp.Channels`.
        total: the integer budget: what `units.total(keep)` gives.
        seed: of what is drawn at random.

    Example:
        class Smallest(harp.Pruner):
            def __init__(self, units, keep):
                super().__init__(units, units.total(keep))

            def masks(self):
                return harp.GlobalMagnitude(self.units, self.total / self.units.size).masks()
    """

    # What a method is. A subclass is another method, so it inherits none of these.
    title: ClassVar[str | None] = None  # what texts call it; None: its name in the table
    paper: ClassVar[Paper | None] = None
    taxonomy: ClassVar[Taxonomy | None] = None  # its place in the Adversarial Pruning Benchmark
    same_as: ClassVar[str | None] = None  # the method that gives the same bits, whose trained stages serve it too

    # How a method's stages are laid out when methods are compared under one recipe.
    from_scratch: ClassVar[bool] = False  # it trains from random weights: pre-training would be wasted on it
    passes: ClassVar[int | None] = None  # epochs of pruning it has use for; None: any number
    finetuning: ClassVar[Mapping[str, Any]] = {}  # the objective it fine-tunes by, if the paper has its own
    layout: ClassVar[Layout] = Layout()  # the stages of its paper, for comparisons by the protocol `paper`

    revision: ClassVar[int] = 1  # part of its stages' hashes: raise it when the same options give another result

    granular: ClassVar[bool] = False  # it moves single weights and counts them: it has no form for units of other kinds

    # Plain attributes that `state_dict` must hold beside tensors.
    remembered: ClassVar[tuple[str, ...]] = ("draws", "was_reset")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("title", "paper", "taxonomy", "same_as"):
            if name not in vars(cls):
                setattr(cls, name, None)

    def __init__(self, units: Units, total: int, seed: int = 0) -> None:
        super().__init__()
        if self.granular and not (units.kind == "weights" and exact(units)):
            raise RecipeError(
                f"{type(self).__name__} prunes single weights under a budget of weights: it has no form for "
                f"{units.kind} under a budget of {units.noun}"
            )
        self.units = units
        self.total = total
        self.example = units.example  # images of the kind to come; a training supplies them if they are not known
        self.seed, self.draws, self.was_reset = seed, 0, False
        self._optimizer: Optimizer | None = None
        self._flags: dict[str, bool] = {}
        # An optimiser that steps latents never clears the weights' gradients: an earlier training's would be added to
        # the first ones of this.
        units.model.zero_grad()

    def wrap(self, objective: Loss) -> Loss:
        """What is minimised, given the objective of the training; most methods leave it alone."""
        return objective

    def bind(self, optimizer: Optimizer) -> None:
        """Get to know the optimiser that steps what this pruner learns."""
        self._optimizer = optimizer

    def trainable(self) -> list[ParameterGroup]:
        """The parameter groups that the optimiser may step; sets `requires_grad` to match."""
        return [{"params": [p for p in self.units.model.parameters() if p.requires_grad]}]

    def start(self, plan: Plan | None = None) -> None:
        """Write the first weights."""

    def after_backward(self) -> None:
        """Turn the weights' gradients into what the optimiser needs."""

    def after_step(self) -> None:
        """Write the new weights."""

    def after_epoch(self) -> None:
        """Advance what changes by epoch."""

    def observe(self, record: Mapping[str, Any]) -> None:
        """See what the epoch came to: its mean loss and, where there is validation, its accuracies."""

    @property
    def ready(self) -> bool:
        """Whether the weights in force meet the budget closely enough for the epoch to be chosen."""
        return True

    def masks(self) -> Masks:
        """The answer: masks of the parameters, in the order of `units.masked`, exactly within budget."""
        return {
            n: torch.ones_like(w, dtype=torch.bool) for n, w in zip(self.units.masked, self.units.weights, strict=True)
        }

    def lasting(self) -> Masks | None:
        """Masks outside which no gradient counts, the same all through the training; None if there are none."""
        return None

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Let the model hold the answer's weights for a while: what is validated is what would be saved."""
        in_force = [weight.detach().clone() for weight in self.units.weights]
        self.write(self.masks())
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, value in zip(self.units.weights, in_force, strict=True):
                    weight.copy_(value)

    def finish(self) -> Masks:
        """Leave the answer in the model, give its parameters back as they came, and return the masks."""
        answer = self.masks()
        self.write(answer)
        for name, flag in self._flags.items():
            self.units.model.get_parameter(name).requires_grad_(flag)
        self._flags = {}
        return answer

    def write(self, masks: Masks) -> None:
        """Let the model hold its weights under these masks."""
        mask_ops.apply(self.units.model, masks)

    def metrics(self) -> dict[str, float]:
        """Numbers worth logging every epoch."""
        return {}

    def attach(self, optimizer: Optimizer) -> Self:
        """Ride on any training loop: the optimiser steps what this pruner learns, the weights follow by themselves.

        Call `after_epoch()` at the end of each epoch and `finish()` at the end.
        """
        if self.wrap(_unknown_loss) is not _unknown_loss:
            raise ModelError(f"{type(self).__name__} changes the loss, which your own loop does not know: use harp.fit")
        groups = self.trainable()
        optimizer.param_groups.clear()
        optimizer.state.clear()
        for group in groups:
            optimizer.add_param_group(group)
        self.bind(optimizer)
        self.start()
        optimizer.register_step_pre_hook(lambda *_: self.after_backward())
        optimizer.register_step_post_hook(lambda *_: self.after_step())
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict` must hold beside tensors."""
        return {name: getattr(self, name) for name in self.remembered}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take it back."""
        for name, value in state.items():
            setattr(self, name, value)

    def generator(self) -> torch.Generator:
        """Randomness on the host that depends on the seed and on how often it was asked for.

        So it is the same on every rank, and after a resume.
        """
        self.draws += 1
        return torch.Generator().manual_seed(derive(self.seed, "pruner", self.draws))

    def reset(self) -> None:
        """Start from random weights: every module that can draws its own afresh, once in a training.

        The draws are the same on every rank. Bare parameters, such as class tokens, belong to nobody who could.
        """
        if self.was_reset:
            return
        model, self.was_reset = self.units.model, True
        with torch.random.fork_rng({p.device for p in model.parameters() if p.device.type == "cuda"}):
            torch.manual_seed(self.generator().initial_seed())
            for module in reversed(list(model.modules())):  # who holds others has the last word on them
                for name in ("reset_parameters", "_reset_parameters"):  # attention calls its own by the second name
                    getattr(module, name, _nothing)()

    def momentum(self, parameter: nn.Parameter) -> Tensor:
        """The optimiser's running mean of the parameter's gradients; zero before the first step."""
        state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
        found = next((state[key] for key in ("momentum_buffer", "exp_avg") if state.get(key) is not None), None)
        return torch.zeros_like(parameter) if found is None else found

    def forget(self, parameter: nn.Parameter, where: Tensor) -> None:
        """Let the optimiser know nothing of the past of these entries."""
        for value in {} if self._optimizer is None else self._optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value.masked_fill_(where, 0.0)

    def _lend(self) -> list[nn.Parameter]:
        """Let the prunable weights lend their gradients only; return all else that the model trains."""
        weights = {id(weight) for weight in self.units.weights}
        others = [p for p in self.units.model.parameters() if p.requires_grad and id(p) not in weights]
        self._train_only([*others, *self.units.weights])
        return others

    def _train_only(self, chosen: Iterable[nn.Parameter]) -> None:
        """Ask gradients of these model parameters only, and remember how it was."""
        wanted = {id(parameter) for parameter in chosen}
        for name, parameter in self.units.model.named_parameters():
            self._flags.setdefault(name, parameter.requires_grad)
            parameter.requires_grad_(id(parameter) in wanted)


class Dense(Pruner):
    """Train all weights, prune none.

    Arguments:
        units: any; nothing of them is pruned.

    Example:
        harp.fit(model, batches, harp.Natural(), harp.Dense(harp.Weights(model)), epochs=1)
    """

    def __init__(self, units: Units) -> None:
        super().__init__(units, units.size)


class Fixed(Pruner):
    """Train under masks that stay: fine-tuning. Weights outside are zero at every moment, whatever the optimiser.

    Arguments:
        units: what may be pruned: `harp.Weights` or `harp.Channels`.
        masks: what stays, by parameter: those of a pruner, or from `harp.load_masks`.
        seed: of what is drawn at random.

    Example:
        masks = harp.Magnitude(units, keep=0.1).masks()
        harp.fit(model, batches, harp.Natural(), harp.Fixed(units, masks), epochs=1, lr=0.01)
    """

    def __init__(self, units: Units, masks: Mapping[str, Tensor], seed: int = 0) -> None:
        super().__init__(units, _spent(units, masks), seed)
        for i, name in enumerate(units.masked):
            self.register_buffer(f"mask{i}", masks[name].to(units.weights[i].device, torch.bool))

    def current(self) -> Masks:
        """The masks in force."""
        return {name: self.get_buffer(f"mask{i}") for i, name in enumerate(self.units.masked)}

    def masks(self) -> Masks:
        """The same."""
        return self.current()

    def lasting(self) -> Masks | None:
        """The same."""
        return self.current()

    def start(self, plan: Plan | None = None) -> None:
        """Zero what is outside the masks."""
        self.write(self.current())

    def after_backward(self) -> None:
        """Drop the gradients outside the masks, so that momentum never learns of them."""
        for weight, mask in zip(self.units.weights, self.current().values(), strict=True):
            if weight.grad is not None:
                weight.grad.masked_fill_(~mask, 0.0)

    def after_step(self) -> None:
        """Zero what is outside the masks: an optimiser may move weights that have no gradient."""
        self.write(self.current())


class Dynamic(Fixed):
    """Train sparse from the first step, under masks that move: the base of dynamic sparse training.

    Arguments:
        units: what may be pruned: `harp.Weights` or `harp.Channels`.
        masks: those to start from, by parameter.
        seed: of what is drawn at random.

    Example:
        pruner = harp.Dynamic(units, harp.Random(units, keep=0.1).masks())
        pruner.move(harp.Random(units, keep=0.1, seed=1).masks())
    """

    from_scratch = True

    def lasting(self) -> Masks | None:
        """None: the masks move, and by the gradients of what is pruned as well."""
        return None

    @torch.no_grad()
    def move(self, masks: Mapping[str, Tensor]) -> None:
        """Put other masks in force: what comes starts from zero, and the optimiser forgets what comes and goes."""
        for i, (name, weight) in enumerate(zip(self.units.masked, self.units.weights, strict=True)):
            mask = self.get_buffer(f"mask{i}")
            self.forget(weight, mask != masks[name])
            mask.copy_(masks[name])
        self.write(self.current())


class Latent(Pruner, ABC):
    """Learn the mask over frozen weights: the base of the score-based methods.

    The dense weights are kept aside; the model holds dense * mask. A subclass says which masks are in force (`current`)
    and how the gradient on a mask reaches what it learns (`pull`). Norms' affine parameters are trained along, as in
    the authors' code (only scores and quotas are variables in the papers' formulas), save for those that came frozen;
    biases and weights are frozen.

    Arguments:
        units: what may be pruned: `harp.Weights` or `harp.Channels`.
        keep: the share of the budget's unit that is kept, above 0 and at most 1.

    Example:
        class Scores(harp.Latent):
            def __init__(self, units, keep):
                super().__init__(units, keep)
                self.scores = torch.nn.ParameterList(torch.nn.Parameter(s) for s in units.strength(units.weights, 1))

            def current(self):
                ranked = torch.cat([s.detach().flatten() for s in self.scores]).sort(descending=True).values
                return self.units.expand([s.detach() >= ranked[self.total - 1] for s in self.scores])

            def masks(self):
                return self.current()

            def pull(self, gradients):
                for score, gradient in zip(self.scores, gradients, strict=True):
                    score.grad = gradient

            def latents(self):
                return [{"params": list(self.scores)}]
    """

    dense: nn.ParameterList

    def __init__(self, units: Units, keep: float) -> None:
        super().__init__(units, units.total(keep))
        self.dense = nn.ParameterList(nn.Parameter(w.detach().clone(), requires_grad=False) for w in units.weights)

    @abstractmethod
    def current(self) -> Masks:
        """The masks in force."""

    @abstractmethod
    def pull(self, gradients: list[Tensor | None]) -> None:
        """Set the latents' gradients from the gradients on the units' masks, which may be overwritten."""

    @abstractmethod
    def latents(self) -> list[ParameterGroup]:
        """The groups of what is learned, in the pruner itself."""

    def trainable(self) -> list[ParameterGroup]:
        """What is learned, and the norms of the model; prunable weights only lend their gradients."""
        norms = [module for module in self.units.model.modules() if isinstance(module, _NORMS)]
        affine = [p for norm in norms for p in norm.parameters(recurse=False) if p.requires_grad]
        self._train_only([*affine, *self.units.weights])
        first, *others = self.latents()
        return [{**first, "params": [*first["params"], *affine]}, *others]

    def start(self, plan: Plan | None = None) -> None:
        """Write the first weights."""
        self.write(self.current())

    def after_backward(self) -> None:
        """Pull the weights' gradients back: the gradient on a mask is that on what it masks times the dense weights."""
        weights = self.units.weights
        gradients = [
            None if w.grad is None else w.grad.mul_(d.detach()) for w, d in zip(weights, self.dense, strict=True)
        ]
        for weight in weights:
            weight.grad = None  # the optimiser never sees these weights, so nobody else would clear it
        self.pull(self.units.gather(gradients))

    def after_step(self) -> None:
        """Write the weights that the new latents give."""
        self.write(self.current())

    @torch.no_grad()
    def write(self, masks: Masks) -> None:
        """Let the model hold dense * mask."""
        for weight, dense, mask in zip(self.units.weights, self.dense, masks.values(), strict=True):
            if torch.is_autocast_enabled(weight.device.type):
                raise ModelError(
                    "weights written inside autocast, whose cache would keep the old ones: write outside it"
                )
            weight.copy_(torch.where(mask, dense, 0.0))


def largest(units: Units, strengths: Sequence[Tensor], counts: Iterable[int]) -> Masks:
    """Masks that keep so many units of each layer, those of largest strength."""
    return units.expand([top_k(strength, count) for strength, count in zip(strengths, counts, strict=True)])


def random_masks(units: Units, counts: Iterable[int], seed: int) -> Masks:
    """Masks that keep so many units of each layer, drawn at random."""
    generator = torch.Generator().manual_seed(derive(seed, "masks"))
    layers = zip(units.strength(units.weights, 1), counts, strict=True)
    return units.expand(
        [mask_ops.at_random(torch.ones_like(like, dtype=torch.bool), count, generator) for like, count in layers]
    )


def _nothing() -> None:
    """Stand in for a method that a module does not have."""


def _unknown_loss(model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
    """The loss of somebody's own loop, which is not known here."""
    raise NotImplementedError


def _spent(units: Units, masks: Mapping[str, Tensor]) -> int:
    """What given masks spend, after checking that they fit the units."""
    for name, weight in zip(units.masked, units.weights, strict=True):
        if name not in masks or masks[name].shape != weight.shape:
            raise ModelError(f"no mask of shape {tuple(weight.shape)} for {name!r}: masks of another model?")
    unknown = set(masks) - set(units.masked)
    if unknown:
        raise ModelError(f"mask {min(unknown)!r} belongs to no prunable layer: masks of another model?")
    return units.spent(masks)
