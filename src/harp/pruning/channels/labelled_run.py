"""The labels beside every tensor of a run, and what is known of its weights."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harp.channels import lines
from harp.channels.atoms import Atoms
from harp.channels.labels import alike, along, core, tidy, varying
from harp.channels.running import tensors_of
from harp.channels.traces import Site, Trace, Use
from harp.errors import ModelError


class Records:
    """The labels of all tensors so far.

    A record is a list of labels of the tensor's shape: one for activations, one for each axis of a weight.
    """

    def __init__(self, model: nn.Module, image: Tensor) -> None:
        self.model = model
        self.atoms = Atoms()
        self.named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.named.setdefault(id(tensor), (name, tensor))
        self.parameters = {name for name, _ in model.named_parameters()}
        self.records: dict[int, tuple[Tensor, list[Tensor]]] = {}  # tensors are held, so that ids stay theirs
        self.origin: dict[int, str] = {}  # which weight a tensor is a view of; "computed" if it is made of weights
        self.axes: dict[tuple[str, int], Tensor] = {}
        self.reads: set[tuple[str, int]] = set()
        self.uses: list[Use] = []
        self.computed: list[Use] = []
        self.voids: list[str] = []  # the reason for each negative label, from -1 downwards
        self.pieces: list[tuple[list[Tensor], str]] = []
        self.placed: list[tuple[Tensor, str]] = []
        channels = self.atoms.fresh(image.shape[1])
        self.atoms.lock(channels, "the model's input")
        self.give(image, along(channels, 1, image.shape))

    def finish(self, answer: Any) -> None:
        """Lock what the model answers."""
        leaves = [leaf for leaf in tensors_of(answer) if leaf.is_floating_point()]
        if not leaves:
            raise ModelError(f"{type(self.model).__name__} answers no tensor of numbers: channels can't be tried on it")
        self.lock(leaves, "the model's output")

    def found(self, trains_more: bool) -> Trace:
        """What was found, after locking what would be torn apart."""
        for pieces, where in self.pieces:
            held = [torch.sort(self.atoms.find(each)).values for each in pieces]
            if any(not torch.equal(held[0], other) for other in held[1:]):
                self.atoms.lock(torch.cat(held), f"{where} needs parts of equal width")
        sites = [Site(name, axis, atoms, (name, axis) in self.reads) for (name, axis), atoms in self.axes.items()]
        trace = Trace(self.atoms, sites, self.uses, self.computed, self.placed, trains_more)
        axes: Counter[str] = Counter()
        for site, shared in zip(sites, trace.shared(), strict=True):
            axes[site.name] += shared
            if axes[site.name] > 2:
                self.atoms.lock(site.atoms, f"{site.name} lies along channels of three kinds")
        return trace

    def seen_all(self) -> bool:
        """Whether every parameter was used."""
        seen = {name for name, _ in self.axes}
        return all(name in seen or parameter.ndim < 2 for name, parameter in self.model.named_parameters())

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the input or is a weight."""
        return id(tensor) in self.records or (
            id(tensor) in self.named and tensor.is_floating_point() and bool(tensor.ndim)
        )

    def record(self, tensor: Tensor) -> list[Tensor] | None:
        """The labels of a tensor that depends on the input or is a weight; None for constants."""
        if id(tensor) in self.records:
            return self.records[id(tensor)][1]
        if self.is_known(tensor):
            name = self.named[id(tensor)][0]
            wide = [axis for axis in range(tensor.ndim) if tensor.shape[axis] > 1] or [0]
            axes = [0, 1] if tensor.ndim == 2 else wide
            labels = [along(self.axis(name, tensor, axis), axis, tensor.shape) for axis in axes]
            self.records[id(tensor)] = (tensor, labels)
            self.origin[id(tensor)] = name
            return labels
        return None

    def labels(self, tensor: Tensor) -> Tensor:
        """The labels of what is no weight of several axes; 0 for constants."""
        record = self.record(tensor)
        if record is None:
            return alike(0, tensor.shape)
        return next((labels for labels in record if varying(labels)), record[0])

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight with more than one axis, or a view of one."""
        return sum(bool(varying(labels)) for labels in self.record(tensor) or []) > 1

    def is_matrix(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight that can be multiplied by, also if it has one row or column only."""
        return len(self.record(tensor) or []) == 2

    def axis(self, name: str, tensor: Tensor, axis: int) -> Tensor:
        """The atoms of a weight's axis."""
        if (name, axis) not in self.axes:
            self.axes[name, axis] = self.atoms.fresh(tensor.shape[axis])
        return self.axes[name, axis]

    def give(self, tensor: Tensor, labels: Tensor) -> None:
        """Set an activation's labels."""
        self.records[id(tensor)] = (tensor, [tidy(labels)])
        self.origin.pop(id(tensor), None)

    def void(self, tensors: Iterable[Tensor], reason: str) -> None:
        """Let tensors depend on the input but have no channels."""
        self.voids.append(reason)
        for tensor in tensors:
            self.give(tensor, alike(-len(self.voids), tensor.shape))

    def lock(self, tensors: Iterable[Tensor], reason: str) -> None:
        """Lock all that these tensors hold."""
        for tensor in tensors:
            for labels in self.record(tensor) or []:
                self.atoms.lock(core(labels), reason)

    def lock_beside(self, atoms: Tensor, partners: Tensor, where: str) -> None:
        """Lock atoms that meet something without channels, for its reason."""
        lost = (partners <= 0) & (atoms > 0)
        for label in torch.unique(partners[lost]).tolist():
            reason = self.voids[-label - 1] if label < 0 else f"{where} takes a constant beside it"
            self.atoms.lock(atoms[lost & (partners == label)], reason)

    def where(self, func: Any) -> str:
        """An operation and the line of the model that calls it."""
        return f"{func._schema.name.removeprefix('aten::')} at {lines.running(self.model)}"

    def channels(self, tensor: Tensor, axis: int, where: str) -> Tensor:
        """The label of each index along an axis; entries of one index share their fate."""
        if self.is_weight(tensor):
            return torch.zeros(tensor.shape[axis], dtype=torch.long)
        labels = core(self.labels(tensor), keep=axis).movedim(axis, 0).reshape(tensor.shape[axis], -1)
        leading = labels[:, 0].contiguous()
        if labels.shape[1] > 1:
            self.atoms.join(labels, leading[:, None].expand_as(labels))
            least = labels.min(dim=1).values
            self.lock_beside(labels, least[:, None].expand_as(labels), where)
            leading = torch.where(least <= 0, least, leading)
        return leading
