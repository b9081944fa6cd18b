"""The labels of every tensor of a run, and the uses of its weights."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.pruning.channels.forward import running_line, tensors_of
from harp.pruning.channels.labels import Atoms, alike, along, core, tidy, varying
from harp.pruning.channels.traces import Site, Trace, Use
from harp.pruning.operations import Call


class LabelledRun:
    """The labels of all tensors of a run.

    A record is a list of label tensors of the tensor's shape: one for an activation, one for each axis of a weight.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor]) -> None:
        self.model = model
        self.atoms = Atoms()
        self.named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.named.setdefault(id(tensor), (name, tensor))
        self.parameters = dict(model.named_parameters())
        # By id; the tensor is kept so that its id is not reused.
        self.records: dict[int, tuple[Tensor, list[Tensor]]] = {}
        # The weight that a tensor is a view of; "computed" if it is computed from weights.
        self.origin: dict[int, str] = {}
        self.axes: dict[tuple[str, int], Tensor] = {}
        self.reads: set[tuple[str, int]] = set()
        self.uses: list[Use] = []
        self.computed: list[Use] = []
        self.voids: list[str] = []  # the reason for each negative label, from -1 downwards
        self.pieces: list[tuple[list[Tensor], str]] = []
        self.placed: list[tuple[Tensor, str]] = []
        for tensor in inputs:
            if not tensor.is_floating_point():
                continue  # indices, such as tokens: they have no channels
            if tensor.ndim < 2:
                self.void([tensor], "an input without channels")
                continue
            channels = self.atoms.fresh(tensor.shape[1])
            self.atoms.lock(channels, "the model's input")
            self.give(tensor, along(channels, 1, tensor.shape))

    def finish(self, answer: Any) -> None:
        """Lock the channels of the model's output."""
        leaves = [leaf for leaf in tensors_of(answer) if leaf.is_floating_point()]
        if not leaves:
            raise ModelError(
                f"{type(self.model).__name__} returns no floating-point tensor: its channels can't be traced"
            )
        self.lock(leaves, "the model's output")

    def result(self, trains_more: bool) -> Trace:
        """The trace, after locking channels whose removal would break a split into equal parts."""
        for pieces, where in self.pieces:
            atoms = [torch.sort(self.atoms.find(piece)).values for piece in pieces]
            if any(not torch.equal(atoms[0], other) for other in atoms[1:]):
                self.atoms.lock(torch.cat(atoms), f"{where} needs parts of equal width")
        sites = [Site(name, axis, ids, (name, axis) in self.reads) for (name, axis), ids in self.axes.items()]
        trace = Trace(self.atoms, sites, self.uses, self.computed, self.placed, trains_more)
        axes: Counter[str] = Counter()
        for site, shared in zip(sites, trace.shared(), strict=True):
            axes[site.name] += shared
            if axes[site.name] > 2:
                self.atoms.lock(site.atoms, f"{site.name} lies along channels of three kinds")
        return trace

    def seen_all(self) -> bool:
        """Whether every weight was used."""
        seen = {name for name, _ in self.axes}
        return all(name in seen or parameter.ndim < 2 for name, parameter in self.parameters.items())

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the input or is a weight."""
        return id(tensor) in self.records or (
            id(tensor) in self.named and tensor.is_floating_point() and bool(tensor.ndim)
        )

    def record(self, tensor: Tensor) -> list[Tensor]:
        """The labels of a tensor that depends on the input or is a weight; empty for constants."""
        if id(tensor) not in self.records:
            if not self.is_known(tensor):
                return []
            name = self.named[id(tensor)][0]
            wide = [axis for axis in range(tensor.ndim) if tensor.shape[axis] > 1] or [0]
            axes = [0, 1] if tensor.ndim == 2 else wide
            self.put(tensor, [along(self.axis(name, tensor, axis), axis, tensor.shape) for axis in axes], name)
        return self.records[id(tensor)][1]

    def labels(self, tensor: Tensor) -> Tensor:
        """The labels of an activation or a vector; 0 for constants."""
        record = self.record(tensor) or [alike(0, tensor.shape)]
        return next((labels for labels in record if varying(labels)), record[0])

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight with more than one axis, or a view of one."""
        return sum(bool(varying(labels)) for labels in self.record(tensor)) > 1

    def is_matrix(self, tensor: Tensor) -> bool:
        """Whether a tensor is a matrix of weights, also if it has one row or column only."""
        return len(self.record(tensor)) == 2

    def axis(self, name: str, tensor: Tensor, axis: int) -> Tensor:
        """The atoms of a weight's axis."""
        if (name, axis) not in self.axes:
            self.axes[name, axis] = self.atoms.fresh(tensor.shape[axis])
        return self.axes[name, axis]

    def put(self, tensor: Tensor, record: list[Tensor], origin: str | None = None) -> None:
        """Set a tensor's record, and the weight that it is a view of."""
        self.records[id(tensor)] = (tensor, record)
        self.origin.pop(id(tensor), None)
        if origin is not None:
            self.origin[id(tensor)] = origin

    def give(self, tensor: Tensor, labels: Tensor) -> None:
        """Set an activation's labels."""
        self.put(tensor, [tidy(labels)])

    def void(self, tensors: Iterable[Tensor], reason: str) -> int:
        """Label tensors that depend on the input but have no channels; return the label that stands for the reason."""
        self.voids.append(reason)
        for tensor in tensors:
            self.give(tensor, alike(-len(self.voids), tensor.shape))
        return -len(self.voids)

    def lock(self, tensors: Iterable[Tensor], reason: str) -> None:
        """Lock all channels of these tensors."""
        for tensor in tensors:
            for labels in self.record(tensor):
                self.atoms.lock(core(labels), reason)

    def block(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor], reason: str) -> None:
        """Lock all channels of an operation's inputs; its outputs have no channels."""
        self.lock(inputs, reason)
        self.void(outputs, reason)

    def lock_beside(self, atoms: Tensor, partners: Tensor, where: str) -> None:
        """Lock atoms whose partner in an operation has no channels."""
        unpaired = (partners <= 0) & (atoms > 0)
        for label in torch.unique(partners[unpaired]).tolist():
            reason = self.voids[-label - 1] if label < 0 else f"{where} combines it with a constant"
            self.atoms.lock(atoms[unpaired & (partners == label)], reason)

    def unite(self, atoms: Tensor, partners: Tensor, where: str) -> None:
        """Join atoms with their partners in an operation, and lock those whose partner has no channels."""
        self.atoms.join(atoms, partners)
        self.lock_beside(atoms, partners, where)

    def where(self, call: Call) -> str:
        """An operation and the line of the model that calls it."""
        return f"{call.name} at {running_line(self.model)}"

    def channels(self, tensor: Tensor, axis: int, where: str) -> Tensor:
        """The label of each index along an axis; all entries of an index are joined."""
        if self.is_weight(tensor):
            return torch.zeros(tensor.shape[axis], dtype=torch.long)
        labels = core(self.labels(tensor), keep=axis).movedim(axis, 0).reshape(tensor.shape[axis], -1)
        return self.join_rows(labels, where)

    def join_rows(self, labels: Tensor, where: str) -> Tensor:
        """Join the atoms of each row; the label of each row, which is no atom if one of its entries is none."""
        self.atoms.join(labels, labels[:, :1].expand_as(labels))
        least = labels.min(dim=1).values
        self.lock_beside(labels, least[:, None].expand_as(labels), where)
        return torch.where(least <= 0, least, labels[:, 0])
