"""The interface of a pruner. The model stays an ordinary module whose parameters hold the pruned weights.

A pruner writes these weights when it starts and after every optimiser step. After every backward pass it turns the
weights' gradients into gradients of what it learns. So pre-training, pruning and fine-tuning are one loop with three
pruners; attacks, validation, checkpoints, data parallelism and export need not know about pruning.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harp.errors import ModelError, RecipeError
from harp.models.inputs import described
from harp.models.modes import Logits
from harp.pruning import masks as mask_ops
from harp.pruning.holding import hold, lift
from harp.pruning.masks import Masks, at_random, top_k
from harp.pruning.methods.takeover import Takeover, check_optimizer
from harp.pruning.papers import Paper, Taxonomy
from harp.pruning.units import Units, Weights, exact
from harp.system.numbers import brief, per_cent
from harp.system.seeds import derive

ParameterGroup = dict[str, Any]

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Loss(Protocol):
    """The loss of a batch as a function: what a training minimises, and all that a method must know of it."""

    def __call__(self, model: nn.Module, x: Any, y: Any, /, *, forward: Logits | None = None) -> Tensor:
        """The loss of a batch; the pass that it is computed by calls `forward`, the model if that is None."""
        ...


@runtime_checkable
class AttackingLoss(Protocol):
    """A loss whose attack can be called separately."""

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images that the loss is computed at."""
        ...


@runtime_checkable
class TwoPartLoss(AttackingLoss, Protocol):
    """A loss in two parts, so that several losses at the same images need one attack only."""

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The loss at images and their attacked versions."""
        ...


@dataclass(frozen=True)
class Plan:
    """The length and the optimiser of a training, for methods whose own schedules depend on them.

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
    steps: int
    lr: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    shape: Callable[[float], float] = lambda progress: 1.0


@dataclass(frozen=True)
class Phase:
    """A stage as a paper has it; None: as the recipe has it."""

    epochs: int | None = None  # beside 100 epochs of pre-training, HARP's
    lr: float | None = None
    weight_decay: float | None = None
    schedule: str | Mapping[str, Any] | None = None

    def optimizer(self) -> dict[str, Any]:
        """The optimiser's settings that the paper gives."""
        settings = {"lr": self.lr, "weight_decay": self.weight_decay, "schedule": self.schedule}
        return {key: value for key, value in settings.items() if value is not None}


@dataclass(frozen=True)
class Layout:
    """The stages of a method's paper; by default those of the recipe, which are HARP's at the paper's scale."""

    pretrain: Phase = Phase()
    prune: Phase = Phase()  # of a method that trains from scratch: its only stage
    finetune: Phase = Phase()
    step: float | None = None  # step size of the attack in training, relative to ε


class Pruner(nn.Module):
    """The base of every method. By itself it changes no weight: dense training.

    A method's constructor takes `units`, then the options that it has in a recipe. A method that draws random numbers
    also takes a `seed`, which a recipe supplies.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        total: the integer budget: what `units.total(keep)` gives.
        seed: of the random numbers.

    Example:
        class Smallest(harp.Pruner):
            def __init__(self, units, keep):
                super().__init__(units, units.total(keep))

            def masks(self):
                return harp.GlobalMagnitude(self.units, self.total / self.units.size).masks()
    """

    # The description of a method. A subclass is another method, so it inherits none of these.
    title: ClassVar[str | None] = None  # its name in texts; None: its name in the table
    paper: ClassVar[Paper | None] = None
    taxonomy: ClassVar[Taxonomy | None] = None  # its place in the Adversarial Pruning Benchmark
    same_as: ClassVar[str | None] = None  # the method with the same results to the bit: both share trained stages

    # How a method's stages are laid out when methods are compared under one recipe.
    from_scratch: ClassVar[bool] = False  # it starts from random weights, so there is no pre-training
    passes: ClassVar[int | None] = None  # the most epochs of pruning that it can use; None: any number
    finetuning: ClassVar[Mapping[str, Any]] = {}  # its objective of fine-tuning, if the paper has its own
    layout: ClassVar[Layout] = Layout()  # the stages of its paper, for comparisons by the protocol `paper`

    revision: ClassVar[int] = 1  # part of the stages' hashes: raise it when the same options give another result
    granular: ClassVar[bool] = False  # it only works on single weights under a budget of weights
    remembered: ClassVar[tuple[str, ...]] = ("draws", "was_reset")  # attributes, no tensors, that `state_dict` holds

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("title", "paper", "taxonomy", "same_as"):
            if name not in vars(cls):
                setattr(cls, name, None)

    def __init__(self, units: Units | nn.Module, total: int, seed: int = 0) -> None:
        super().__init__()
        units = as_units(units)
        if self.granular and not (units.kind == "weights" and exact(units)):
            raise RecipeError(
                f"{type(self).__name__} prunes single weights under a budget of weights: it has no form for "
                f"{units.kind} under a budget of {units.noun}"
            )
        self.units = units
        self.total = total
        self.example = units.example  # what the model is called with; `fit` supplies one if there is none
        self.seed, self.draws, self.was_reset = seed, 0, False
        self._optimizer: Optimizer | None = None
        self._taken: Takeover | None = None  # the optimiser of somebody's own loop
        self._result: Masks | None = None  # of `finish`
        self._flags: dict[str, bool] = {}
        units.model.zero_grad()  # those of an earlier training would be added to the first of this one

    def wrap(self, objective: Loss) -> Loss:
        """The loss that is minimised, given the training's; most methods use that."""
        return objective

    def bind(self, optimizer: Optimizer) -> None:
        """Take the optimiser of the training, in which masks of an earlier one no longer hold."""
        self._optimizer, self._result = optimizer, None
        lift(self.units.model)

    def trainable(self) -> list[ParameterGroup]:
        """The parameter groups of the optimiser; sets `requires_grad` accordingly."""
        return [{"params": [p for p in self.units.model.parameters() if p.requires_grad]}]

    def start(self, plan: Plan | None = None) -> None:
        """Write the first weights."""

    def after_backward(self) -> None:
        """Turn the weights' gradients into those that the optimiser needs."""

    def after_step(self) -> None:
        """Write the new weights."""

    def after_epoch(self) -> None:
        """Update what changes once an epoch."""

    def observe(self, record: Mapping[str, Any]) -> None:
        """Take the record of an epoch: its mean loss and, with validation, its accuracies."""

    @property
    def ready(self) -> bool:
        """Whether the current weights meet the budget closely enough for the epoch to be chosen."""
        return True

    def masks(self) -> Masks:
        """The result: masks of the parameters, in the order of `units.masked`, exactly within budget."""
        return self.by_name(torch.ones_like(weight, dtype=torch.bool) for weight in self.units.weights)

    def lasting(self) -> Masks | None:
        """Masks that stay for the whole training and outside which no gradient is used; None if there are none."""
        return None

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Put the final weights into the model for a while: those that would be saved are validated."""
        before = [weight.detach().clone() for weight in self.units.weights]
        self.write(self.masks())
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, value in zip(self.units.weights, before, strict=True):
                    weight.copy_(value)

    def finish(self) -> Masks:
        """Leave the final weights in the model, and return the masks, which hold until `harp.lift_masks`.

        `requires_grad` of the model's parameters is as it was before, and an attached optimiser trains them again: the
        weights inside the masks, from where they are now. Another call only returns the masks.
        """
        if self._result is None:
            self._result = self.masks()
            self.write(self._result)
            self.release()
            hold(self.units.model, self._result)
        return self._result

    def release(self) -> None:
        """Give back what a training took: `requires_grad` of the model's parameters, and an attached optimiser."""
        for name, flag in self._flags.items():
            self.units.model.get_parameter(name).requires_grad_(flag)
        self._flags = {}
        if self._taken is not None:
            self._taken.give_back(scheduled=True)
            self._taken = None

    def write(self, masks: Masks) -> None:
        """Put the weights under these masks into the model."""
        mask_ops.apply(self.units.model, masks)

    def metrics(self) -> dict[str, float]:
        """Numbers worth logging every epoch."""
        return {}

    def attach(self, optimizer: Optimizer) -> Self:
        """Prune in any training loop: the optimiser then steps what this pruner learns, which updates the weights.

        Call `after_epoch()` at the end of each epoch and `finish()` at the end. After that the optimiser trains the
        weights that are left. Until then the optimiser's `state_dict` holds the pruner's.
        """
        self.take_over(optimizer).around_steps(self.after_backward, self.after_step)
        return self

    def take_over(self, optimizer: Optimizer, plan: Plan | None = None) -> Takeover:
        """Give the optimiser what this pruner learns, and start.

        The caller calls `after_backward` and `after_step` around each step; `attach` does that by itself.
        """
        if self.wrap(_unknown_loss) is not _unknown_loss:
            raise ModelError(f"{type(self).__name__} changes the loss, which your own loop does not know: use harp.fit")
        if self._taken is not None:
            raise RecipeError("this pruner is attached already: call its finish() before you attach it again")
        check_optimizer(optimizer, self.units.model)
        self.to(self.units.weights[0].device)  # the model may have been moved since the pruner was made
        self._taken = Takeover(optimizer, self.trainable(), self.units.model)
        self.bind(optimizer)
        self.start(plan)

        def load(state: dict[str, Any]) -> None:
            self.load_state_dict(state)
            self.start(plan)

        self._taken.within_its_state(self.state_dict, load)
        return self._taken

    def __repr__(self) -> str:
        """The method and its budget in a line."""
        size = self.units.size
        return (
            f"{type(self).__name__}(keeps {self.total:,} of {size:,} {self.units.noun}, {per_cent(self.total / size)})"
        )

    def get_extra_state(self) -> dict[str, Any]:
        """The attributes that `state_dict` holds beside tensors."""
        return {name: getattr(self, name) for name in self.remembered}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load these attributes."""
        for name, value in state.items():
            setattr(self, name, value)

    def by_name(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Tensors, one for each masked parameter, by its name."""
        return dict(zip(self.units.masked, tensors, strict=True))

    def add_buffers(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Register buffers, one for each masked parameter, called `name` and its number."""
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"{name}{i}", tensor)

    def layer_buffers(self, name: str) -> list[Tensor]:
        """The buffers that `add_buffers` registered."""
        return [self.get_buffer(f"{name}{i}") for i in range(len(self.units.masked))]

    def generator(self) -> torch.Generator:
        """A generator that depends on the seed and the number of calls: the same on all ranks and after a resume."""
        self.draws += 1
        return torch.Generator().manual_seed(derive(self.seed, "pruner", self.draws))

    def reset(self) -> None:
        """Draw random weights, once in a training; they are the same on every rank.

        Every module that can resets its own parameters. Bare parameters, such as class tokens, stay.
        """
        if self.was_reset:
            return
        model, self.was_reset = self.units.model, True
        with torch.random.fork_rng({p.device for p in model.parameters() if p.device.type == "cuda"}):
            torch.manual_seed(self.generator().initial_seed())
            for module in reversed(list(model.modules())):  # a parent comes last and may reset its children's
                for name in ("reset_parameters", "_reset_parameters"):  # the second is that of attention
                    if hasattr(module, name):
                        getattr(module, name)()

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimiser's state of a parameter; empty before the first step."""
        return {} if self._optimizer is None else self._optimizer.state.get(parameter, {})

    def momentum(self, parameter: nn.Parameter) -> Tensor:
        """The optimiser's running mean of the parameter's gradients; zero before the first step."""
        state = self.optimizer_state(parameter)
        means = (state.get(key) for key in ("momentum_buffer", "exp_avg"))
        return next((mean for mean in means if mean is not None), torch.zeros_like(parameter))

    def forget(self, parameter: nn.Parameter, where: Tensor) -> None:
        """Set the optimiser's state of these entries to zero."""
        for value in self.optimizer_state(parameter).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value.masked_fill_(where, 0.0)

    def take_gradients(self) -> list[Tensor | None]:
        """Take the gradients off prunable weights that the optimiser does not step, as it would never clear them."""
        gradients = [weight.grad for weight in self.units.weights]
        for weight in self.units.weights:
            weight.grad = None
        return gradients

    def train_others(self) -> list[nn.Parameter]:
        """All that the model trains except prunable weights, of which only the gradients are needed."""
        weights = {id(weight) for weight in self.units.weights}
        others = [p for p in self.units.model.parameters() if p.requires_grad and id(p) not in weights]
        self.require_gradients([*others, *self.units.weights])
        return others

    def require_gradients(self, chosen: Iterable[nn.Parameter]) -> None:
        """Compute the gradients of these model parameters only, until `finish`."""
        wanted = {id(parameter) for parameter in chosen}
        for name, parameter in self.units.model.named_parameters():
            self._flags.setdefault(name, parameter.requires_grad)
            parameter.requires_grad_(id(parameter) in wanted)


class Dense(Pruner):
    """Train all weights, prune none.

    Arguments:
        units: any, or a model; nothing of them is pruned.

    Example:
        harp.fit(model, batches, harp.Natural(), harp.Dense(harp.Weights(model)), epochs=1)
    """

    def __init__(self, units: Units | nn.Module) -> None:
        units = as_units(units)
        super().__init__(units, units.size)


class Fixed(Pruner):
    """Train under masks that stay: fine-tuning. Weights outside the masks are zero after every step.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        masks: by parameter: those of a pruner, or from `harp.load_masks`.
        seed: of the random numbers.

    Example:
        masks = harp.Magnitude(units, keep=0.1).masks()
        harp.fit(model, batches, harp.Natural(), harp.Fixed(units, masks), epochs=1, lr=0.01)
    """

    def __init__(self, units: Units | nn.Module, masks: Mapping[str, Tensor], seed: int = 0) -> None:
        units = as_units(units)
        super().__init__(units, _spent(units, masks), seed)
        named = zip(units.masked, units.weights, strict=True)
        self.add_buffers("mask", [masks[name].to(weight.device, torch.bool) for name, weight in named])

    def current(self) -> Masks:
        """The masks that the weights have now."""
        return self.by_name(self.layer_buffers("mask"))

    def masks(self) -> Masks:
        """The same."""
        return self.current()

    def lasting(self) -> Masks | None:
        """The same."""
        return self.current()

    def start(self, plan: Plan | None = None) -> None:
        """Zero the weights outside the masks."""
        self.write(self.current())

    def after_backward(self) -> None:
        """Zero the gradients outside the masks, so that they do not enter the momentum."""
        for weight, mask in zip(self.units.weights, self.layer_buffers("mask"), strict=True):
            if weight.grad is not None:
                weight.grad.masked_fill_(~mask, 0.0)

    def after_step(self) -> None:
        """Zero the weights outside the masks: an optimiser may move weights that have no gradient."""
        self.write(self.current())


class Dynamic(Fixed):
    """Train sparse from the first step under changing masks: the base of dynamic sparse training.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        masks: the first masks, by parameter.
        seed: of the random numbers.

    Example:
        pruner = harp.Dynamic(units, harp.Random(units, keep=0.1).masks())
        pruner.move(harp.Random(units, keep=0.1, seed=1).masks())
    """

    from_scratch = True

    def lasting(self) -> Masks | None:
        """None: the masks change, and the gradients of pruned weights may be needed for that."""
        return None

    @torch.no_grad()
    def move(self, masks: Mapping[str, Tensor]) -> None:
        """Change the masks: new weights start from zero, and the optimiser forgets what comes and goes."""
        for (name, mask), weight in zip(self.current().items(), self.units.weights, strict=True):
            self.forget(weight, mask != masks[name])
            mask.copy_(masks[name])
        self.write(self.current())

    def largest_live(self, counts: Iterable[int]) -> list[Tensor]:
        """Masks of so many live weights of each layer, those of largest magnitude."""
        layers = zip(self.units.weights, self.layer_buffers("mask"), counts, strict=True)
        return [top_k(weight.detach().abs().masked_fill(~mask, -1.0), count) for weight, mask, count in layers]


class Latent(Pruner, ABC):
    """Learn the mask of frozen weights: the base of the score-based methods.

    The pruner keeps the dense weights; the model holds dense * mask. A subclass computes the current masks (`current`)
    and turns the gradient of a mask into that of its latents, what it learns (`pull`). Affine parameters of norms are
    trained too, as in the authors' code (in the papers' formulas only scores and quotas are variables), unless they
    were frozen before; biases and weights are frozen.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".

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

    def __init__(self, units: Units | nn.Module, keep: float | str) -> None:
        units = as_units(units)
        super().__init__(units, units.total(keep))
        self.dense = nn.ParameterList(nn.Parameter(w.detach().clone(), requires_grad=False) for w in units.weights)

    @abstractmethod
    def current(self) -> Masks:
        """The masks that the weights have now."""

    @abstractmethod
    def pull(self, gradients: list[Tensor | None]) -> None:
        """Set the latents' gradients from those of the units' masks, which may be overwritten."""

    @abstractmethod
    def latents(self) -> list[ParameterGroup]:
        """The parameter groups of the latents."""

    def trainable(self) -> list[ParameterGroup]:
        """The latents, and the norms of the model; of prunable weights only the gradients are needed."""
        norms = [module for module in self.units.model.modules() if isinstance(module, _NORMS)]
        masked = {id(weight) for weight in self.units.weights}  # some may be of norms, on request
        affine = [p for m in norms for p in m.parameters(recurse=False) if p.requires_grad and id(p) not in masked]
        self.require_gradients([*affine, *self.units.weights])
        first, *others = self.latents()
        return [{**first, "params": [*first["params"], *affine]}, *others]

    def start(self, plan: Plan | None = None) -> None:
        """Write the first weights."""
        self.write(self.current())

    def after_backward(self) -> None:
        """Pull the weights' gradients back: the gradient of a mask is that of the weight times the dense weight."""
        pairs = zip(self.take_gradients(), self.dense, strict=True)
        self.pull(self.units.gather([None if grad is None else grad.mul_(dense.detach()) for grad, dense in pairs]))

    def after_step(self) -> None:
        """Write the weights that the new latents give."""
        self.write(self.current())

    @torch.no_grad()
    def write(self, masks: Masks) -> None:
        """Put dense * mask into the model."""
        for weight, dense, mask in zip(self.units.weights, self.dense, masks.values(), strict=True):
            if torch.is_autocast_enabled(weight.device.type):
                raise ModelError("weights written inside autocast, whose cache keeps the old ones: write outside it")
            weight.copy_(torch.where(mask, dense, 0.0))


def as_units(units: Units | nn.Module) -> Units:
    """The units themselves, or the weights of a model."""
    if isinstance(units, nn.Module) and not isinstance(units, Pruner):
        return Weights(units)
    if isinstance(units, Pruner) or not hasattr(units, "total"):
        raise RecipeError(f"units {brief(units)}: give a model, harp.Weights(model) or harp.Channels(model, images)")
    return units


def check_option(valid: bool, name: str, value: float | None, advice: str) -> None:
    """Refuse the value of an option by one line that says what would be right."""
    if not valid:
        raise RecipeError(f"{name} {value:.6g}: {advice}")


def check_labels(method: Pruner, x: Any, y: Any, advice: str) -> None:
    """Refuse a batch that is not of classification, for a method whose own loss is the cross entropy."""
    known = isinstance(x, Tensor) and isinstance(y, Tensor) and y.shape == x.shape[:1] and not y.is_floating_point()
    if not known:
        given = f"{described(x)} and {described(y)}"
        raise ModelError(
            f"{type(method).__name__} is for classification, an integer label for each row of a tensor, and the batch "
            f"has {given}: {advice}"
        )


def largest(units: Units, strengths: Sequence[Tensor], counts: Iterable[int]) -> Masks:
    """Masks that keep so many units of each layer, those of largest strength."""
    return units.expand([top_k(strength, count) for strength, count in zip(strengths, counts, strict=True)])


def random_masks(units: Units, counts: Iterable[int], seed: int) -> Masks:
    """Masks that keep so many units of each layer, drawn at random."""
    generator = torch.Generator().manual_seed(derive(seed, "masks"))
    anywhere = [torch.ones_like(strength, dtype=torch.bool) for strength in units.strength(units.weights, 1)]
    return units.expand([at_random(where, count, generator) for where, count in zip(anywhere, counts, strict=True)])


def _unknown_loss(model: nn.Module, x: Any, y: Any, forward: Logits | None = None) -> Tensor:
    """The loss of a loop that is not `harp.fit`; it is never called."""
    raise NotImplementedError


def _spent(units: Units, masks: Mapping[str, Tensor]) -> int:
    """The cost of given masks, after a check that they fit the units."""
    mask_ops.check_mapping(masks)
    for name, weight in zip(units.masked, units.weights, strict=True):
        if name not in masks or masks[name].shape != weight.shape:
            raise ModelError(f"no mask of shape {tuple(weight.shape)} for {name!r}: masks of another model?")
    unknown = set(masks) - set(units.masked)
    if unknown:
        raise ModelError(f"mask {min(unknown)!r} belongs to no prunable layer: masks of another model?")
    return units.spent(masks)
