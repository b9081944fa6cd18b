"""ANP-VS: learn which channels a robust network does not need, and keep its features stable under attack.

Madaan, Shin, Hwang: "Adversarial Neural Pruning with Latent Vulnerability Suppression", ICML 2020, on Beta-Bernoulli
dropout (see `beta_bernoulli.py` for the masks z, their mean E[π] and the divergence KL). The masks are on the output
channels of convolutions, before their batch norms, and on the inputs of linear layers:

    masks minimise     CE(x̃) + β KL / N                              N images of training, x̃ attacked in eval mode
    weights minimise   (CE(x) + 2 CE(x̃)) / 3 + λ VS                  VS = mean over layers of mean |h(x̃) − h(x)|
    a unit is pruned   if E[π] is at most 0.001

Departures from the authors' code:
- x̃ comes from the training's own attack on images in [0, 1]. Theirs standardises every image and then clips the
  attacked one to [0, 1]. Most of a standardised image is outside, so the attack can't move those pixels, and ε is in
  another unit. The option `standardised` does the same, to show what that hides (see
  docs/reference/methods.md). The network then expects standardised images: accuracies that a run measures on plain
  ones mean nothing.
- The clean and the attacked pass share their z. Theirs draw new ones, so that VS is mostly the noise of the masks.
- h are the outputs of the activation modules (of the gated convolutions in a model without any), and of the hidden
  linear layers before their activation, as theirs; the term of their first layer has no gradient, here it has.
- They make two passes for the losses and two more for VS; here the same two are used for both.
- Their masks and weights have an Adam each. Here the weights have the optimiser of the training. The masks keep Adam's
  direction (with the rate `mask_lr`): with plain SGD of the same rate no unit would ever reach the threshold.
- L2 is the optimiser's weight decay. They train 200 epochs from a natural network and stop; here pruning is one stage,
  followed by fine-tuning as for every method. For that E[π] is multiplied into the weights at the end.
- Sparsity is no target there. With `keep` it is: units are kept in the order of E[π] until the budget is full.
- A linear layer that comes first (its input is the image) and weights that no plain convolution or linear layer owns,
  such as packed attention projections, have no masks. They stay dense; under `keep` they take an equal share by size.
- A pruned unit counts as many weights as it has; their "percent of zero weights" counts units.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from harp.attacks import Attack, Ball, ascend, check_number, step_size
from harp.attacks.fast_forward import frozen
from harp.errors import ModelError
from harp.models.modes import Logits
from harp.pruning import masks as mask_ops
from harp.pruning.allocation import uniform
from harp.pruning.masks import Masks
from harp.pruning.methods.base import (
    AttackingLoss,
    Loss,
    ParameterGroup,
    Plan,
    Pruner,
    as_units,
    check_labels,
    check_option,
)
from harp.pruning.methods.beta_bernoulli import Gate
from harp.pruning.papers import Criterion, Locality, Paper, Structure, Taxonomy
from harp.pruning.units import Units

IMAGES = 50_000  # the authors' N, if that of the training is not known

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Hardswish, nn.Softplus, nn.Tanh)


class AnpVs(Pruner):
    """Learn channel masks by variational dropout on attacked images, and suppress the vulnerability of features.

    Arguments:
        units: what may be pruned: `harp.Weights` under a budget of weights.
        keep: the share of weights to keep; None: what the learned masks leave.
        beta: weight of the masks' KL divergence.
        vulnerability: weight of VS.
        temperature: of the relaxed Bernoulli masks.
        threshold: a unit is off when the mean of its mask is at most this.
        mask_lr: the masks' learning rate; None: the weights'. A step of Adam moves a and b by about this much, and the
            threshold is about nine away from the start: in a training of few steps the masks need a higher rate.
        standardised: train as the authors' code does, on standardised images with the crippled attack.

    Example:
        pruner = harp.AnpVs(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.PgdTraining(steps=1), pruner, epochs=1, lr=0.1)
    """

    title = "ANP-VS"
    paper = Paper(
        "Adversarial Neural Pruning with Latent Vulnerability Suppression",
        ("Madaan", "Shin", "Hwang"),
        "ICML",
        2020,
        "https://arxiv.org/abs/1908.04355",
    )
    taxonomy = Taxonomy(Criterion.SCORE, Locality.GLOBAL, structure=Structure.CHANNELS)
    granular = True
    remembered = (*Pruner.remembered, "folded", "step", "images")

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str | None = None,
        beta: float = 2.0,
        vulnerability: float = 1e-4,
        temperature: float = 0.1,
        threshold: float = 1e-3,
        mask_lr: float | None = 0.01,
        standardised: bool = False,
    ) -> None:
        check_number("beta", beta)
        check_number("vulnerability", vulnerability)
        check_option(0 < temperature < math.inf, "temperature", temperature, "give a positive number, such as 0.1")
        check_option(0 <= threshold < 1, "threshold", threshold, "give a number from 0 to below 1, such as 0.001")
        valid = mask_lr is None or 0 < mask_lr < math.inf
        check_option(valid, "mask_lr", mask_lr, "give a positive number, or none for the weights' rate")
        units = as_units(units)
        super().__init__(units, 0)
        self._budget = None if keep is None else units.total(keep)
        self.beta, self.vulnerability, self.threshold = beta, vulnerability, threshold
        self.mask_lr, self.standardised = mask_lr, standardised
        self.gates = nn.ModuleDict()
        for i, (name, weight) in enumerate(zip(units.names, units.weights, strict=True)):
            plain = {type(owner) for owner in self.owners(i)} <= {nn.Linear, *_CONVOLUTIONS}
            image = i == 0 and weight.ndim == 2
            if plain and not image and name.endswith("weight"):
                self.gates[str(i)] = Gate(weight.detach(), temperature, threshold)
        self.add_buffers("mask", [torch.zeros_like(weight, dtype=torch.bool) for weight in units.weights])
        if not self.gates:
            raise ModelError(f"{type(units.model).__name__} has no convolution and no hidden linear layer to gate")
        self._handles: list[RemovableHandle] = []
        self._seen = 0  # images of the current step
        self._steps = 0  # steps an epoch; 0: not known
        self.images = 0  # the most images of a step, in all processes
        self.step = 0
        self.folded = False  # whether the weights are the final ones, times E[π], and the buffers their masks

    @property
    def total(self) -> int:
        """The budget; without one, the number of weights that the current masks keep."""
        return mask_ops.kept(self.masks()) if self._budget is None else self._budget

    @total.setter
    def total(self, value: int) -> None:
        self._budget = value

    def owners(self, layer: int) -> list[nn.Module]:
        """The modules that use a layer's weight: several if it is tied."""
        weight = self.units.weights[layer]
        return [m for m in self.units.model.modules() if any(p is weight for p in m.parameters(recurse=False))]

    def __repr__(self) -> str:
        """The method and its budget, if it has one, in a line."""
        return super().__repr__() if self._budget is not None else "AnpVs(keeps what its masks leave)"

    def layers(self) -> Iterator[tuple[int, Gate]]:
        """The gated layers by number."""
        return ((int(key), gate) for key, gate in self.gates.items() if isinstance(gate, Gate))

    def wrap(self, objective: Loss) -> Loss:
        """The two losses, at the images of the objective's attack."""
        settings = ("epsilon", "step", "steps", "norm")
        if self.standardised and all(hasattr(objective, name) for name in settings):
            attack = CrippledPgd(*(getattr(objective, name) for name in settings))
            return partial(self._loss, attack, self.watched())
        if not self.standardised and isinstance(objective, AttackingLoss):
            return partial(self._loss, objective.attack, self.watched())
        raise ModelError("AnpVs has its own losses at attacked images: use harp.fit with an objective that attacks")

    def trainable(self) -> list[ParameterGroup]:
        """The model, and the masks with a rate of their own. Momentum and decay are no part of Adam's step."""
        rate = {} if self.mask_lr is None else {"lr": self.mask_lr}
        return [*super().trainable(), {"params": list(self.parameters()), **rate, "momentum": 0.0, "weight_decay": 0.0}]

    def start(self, plan: Plan | None = None) -> None:
        """Register the gates as hooks of the model."""
        self._steps = 0 if plan is None else plan.steps
        self.after_step()
        if not self._handles and not self.folded:
            self._register()

    def after_backward(self) -> None:
        """Add the gradient of the KL divergence to that of the masks, and turn it into Adam's direction."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = torch.distributed.get_world_size() if several else 1
        self.images, self._seen = max(self.images, self._seen * ranks), 0
        weight = self.beta / (self.images * self._steps or IMAGES)
        self.step += 1
        for _, gate in self.layers():
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(weight * gate.divergence(), gate.raw)
            gradient = gradient if gate.raw.grad is None else gradient + gate.raw.grad
            gate.raw.grad = gradient
            if not isinstance(self._optimizer, torch.optim.Adam):  # Adam computes the direction itself
                gate.raw.grad = gate.adam(gradient, self.step)

    def after_step(self) -> None:
        """Use the new masks in eval mode."""
        for _, gate in self.layers():
            gate.refresh()

    @torch.no_grad()
    def masks(self) -> Masks:
        """Whole units in the order of E[π], those of equal E[π] by their norms; the last one of a layer in part."""
        if self.folded:
            return self.by_name(self.layer_buffers("mask"))
        ranked = {i: self._ranked(i, gate) for i, gate in self.layers()}
        counts = self._thresholded() if self._budget is None else self._within(self._budget, ranked)
        masks = []
        for i, (weight, count) in enumerate(zip(self.units.weights, counts, strict=True)):
            if i not in ranked:
                masks.append(mask_ops.top_k(weight.abs(), count))
                continue
            rows, order = _rows(weight), [unit for *_, unit in ranked[i]]
            mask = torch.zeros_like(rows, dtype=torch.bool)
            whole, rest = divmod(count, rows.shape[1])
            mask[order[:whole]] = True
            if rest:
                mask[order[whole]] = mask_ops.top_k(rows[order[whole]].abs(), rest)
            masks.append(mask.view_as(weight) if weight.ndim > 2 else mask.T.contiguous())
        return self.by_name(masks)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Put the final weights into the model, without gates, for a while."""
        if self.folded:
            yield
            return
        changed: list[Tensor] = [*self.units.weights, *itertools.chain(*(self._biases(i) for i, _ in self.layers()))]
        before, registered = [value.detach().clone() for value in changed], bool(self._handles)
        self._fold()
        try:
            yield
        finally:
            self.folded = False
            with torch.no_grad():
                for parameter, value in zip(changed, before, strict=True):
                    parameter.copy_(value)
            if registered:
                self._register()

    def finish(self) -> Masks:
        """Remove the gates and multiply E[π] into the weights, unless that was done in `exact`."""
        self._fold()
        return super().finish()

    def metrics(self) -> dict[str, float]:
        """The share of units whose mask is above the threshold."""
        on = torch.cat([gate.average > 0 for _, gate in self.layers()])
        return {"units": int(on.count_nonzero()) / on.numel()}

    def _register(self) -> None:
        self._handles += [gate.register(owner) for i, gate in self.layers() for owner in self.owners(i)]

    @torch.no_grad()
    def _fold(self) -> None:
        """Remove the gates; multiply kept weights by E[π], but at least by the threshold, and zero the others."""
        while self._handles:
            self._handles.pop().remove()
        if self.folded:
            return
        masks = self.masks()
        buffers = self.layer_buffers("mask")
        for buffer, mask in zip(buffers, masks.values(), strict=True):
            buffer.copy_(mask)
        for i, gate in self.layers():
            weight = self.units.weights[i]
            scale = gate.expected().clamp_min(self.threshold).to(weight) * _rows(buffers[i]).any(1)
            weight.mul_(scale.view(-1, *[1] * (weight.ndim - 1)) if gate.dimensions else scale)
            for bias in self._biases(i):
                bias.mul_(scale)
        self.write(masks)
        self.folded = True

    def _biases(self, layer: int) -> list[Tensor]:
        """The biases that a layer's masks multiply: those of convolutions."""
        convolutions = [owner for owner in self.owners(layer) if isinstance(owner, _CONVOLUTIONS)]
        return [owner.bias for owner in convolutions if owner.bias is not None]

    def _ranked(self, layer: int, gate: Gate) -> list[tuple[float, float, int]]:
        """A layer's units, best first: −E[π], −norm, number."""
        norms = _rows(self.units.weights[layer]).double().norm(dim=1)
        return sorted(zip((-gate.expected()).tolist(), (-norms).tolist(), range(len(norms)), strict=True))

    def _thresholded(self) -> list[int]:
        """The number of weights of the units above the threshold, at least one unit a layer."""
        counts = list(self.units.upper)
        for i, gate in self.layers():
            size = _rows(self.units.weights[i]).shape[1]
            units = max(1, int((gate.expected() > self.threshold).sum()))
            counts[i] = min(max(units * size, self.units.lower[i]), self.units.upper[i])
        return counts

    def _within(self, budget: int, ranked: Mapping[int, list[tuple[float, float, int]]]) -> list[int]:
        """The number of weights of each layer when the best units of all fill the budget.

        The best unit of each layer comes first. What a layer needs to reach its least count is reserved for it.
        """
        counts = uniform(self.units, budget)  # of layers without gates
        candidates = []
        for i, units in ranked.items():
            counts[i] = 0
            candidates += [(place > 0, *unit[:2], i) for place, unit in enumerate(units)]
        due = {i: self.units.lower[i] for i in ranked}
        free = budget - sum(counts) - sum(due.values())
        for *_, i in sorted(candidates):
            taken = min(self.units.sizes[i] // len(ranked[i]), self.units.upper[i] - counts[i], due[i] + free)
            counts[i] += taken
            free -= max(0, taken - due[i])
            due[i] = max(0, due[i] - taken)
        return counts

    def watched(self) -> list[nn.Module]:
        """The modules whose outputs are the features h."""
        last = len(self.units.names) - 1
        activations = [module for module in self.units.model.modules() if isinstance(module, _ACTIVATIONS)]
        gated = [module for i, gate in self.layers() if gate.dimensions for module in self.owners(i)]
        hidden = [m for i, gate in self.layers() if not gate.dimensions and i != last for m in self.owners(i)]
        return [*(activations or gated), *hidden]

    def _loss(
        self,
        attack: Attack,
        watched: Sequence[nn.Module],
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        forward: Logits | None = None,
    ) -> Tensor:
        """The weights' loss, plus a term of value 0 through which the masks get the gradient of their own loss."""
        forward = forward or model
        check_labels(self, x, y, "use another method")
        self._seen += len(x)
        x = standardise(x) if self.standardised else x
        x_adv = attack(model, x, y)
        gates = [gate for _, gate in self.layers()]
        try:
            for gate in gates:
                gate.record = []
            with outputs_of(watched) as features:
                clean = F.cross_entropy(forward(x), y)
            drawn = [gate.record or [] for gate in gates]
            leaves = [[z.detach().requires_grad_() for z in masks] for masks in drawn]
            for gate, masks in zip(gates, leaves, strict=True):
                gate.record, gate.replay = None, iter(masks)
            with outputs_of(watched) as attacked:
                adversarial = F.cross_entropy(forward(x_adv), y)
        finally:
            for gate in gates:
                gate.record = gate.replay = None  # a copy of the model must not hold a graph
        flat = list(itertools.chain(*leaves))
        if not flat:
            raise ModelError("the forward pass used no gate in train mode: compile or freeze the model after pruning")
        slopes = torch.autograd.grad(adversarial, flat, retain_graph=True, allow_unused=True)
        pull = sum(
            ((z * slope).sum() for z, slope in zip(itertools.chain(*drawn), slopes, strict=True) if slope is not None),
            torch.zeros((), device=x.device),
        )
        shifts = [(h_adv - h).abs().mean() for h_adv, h in zip(attacked, features, strict=True)]
        shift = torch.stack(shifts).mean() if shifts else 0.0
        return (clean + 2 * adversarial) / 3 + self.vulnerability * shift + (pull - pull.detach())


@contextmanager
def outputs_of(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the outputs of modules in a forward pass."""
    outputs: list[Tensor] = []
    with ExitStack() as hooks:
        for module in modules:  # after the gates: hooks run in the order of their registration
            hooks.callback(module.register_forward_hook(lambda m, inputs, output: outputs.append(output)).remove)
        yield outputs


def _rows(weight: Tensor) -> Tensor:
    """A gated weight with one row a unit: a convolution's output channels, a linear layer's inputs."""
    return weight.flatten(1) if weight.ndim > 2 else weight.T


def standardise(x: Tensor) -> Tensor:
    """Images with mean 0 and deviation 1 each, as the authors' network sees them (TensorFlow's function of pixels)."""
    flat = x.flatten(1)
    least = 1 / (255 * math.sqrt(flat.shape[1]))  # theirs is 1/√n for pixels up to 255
    flat = (flat - flat.mean(1, keepdim=True)) / flat.std(1, correction=0, keepdim=True).clamp_min(least)
    return flat.view_as(x)


class Standardised(nn.Module):
    """A network that was trained on standardised images, as one of plain images: the target of an ordinary attack."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of [0, 1] images."""
        logits: Tensor = self.net(standardise(x))
        return logits


@dataclass(frozen=True)
class CrippledPgd:
    """The authors' attack: PGD on standardised images, clipped to [0, 1] and so outside their balls."""

    epsilon: float = 0.03
    step: float | None = 0.007
    steps: int = 10
    norm: str = "linf"

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The attacked versions of standardised images `x`."""
        ball = Ball(self.epsilon, self.norm)
        with torch.no_grad(), frozen(model, x) as net:
            loss = lambda z: F.cross_entropy(z, y, reduction="none")  # noqa: E731
            return ascend(net, x, ball.random(x), loss, ball, step_size(self.step, self.epsilon), self.steps)
