"""Checks that a training's numbers stay finite, without additional synchronisation with the device."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from harp.errors import Diverged


class Guard:
    """Stops a training whose loss, gradients or weights have become NaN or infinite, on all ranks together.

    The numbers of a step are checked after the next step: by then the device has computed them, and no rank waits for
    another. A single process on the CPU checks them immediately.

    Arguments:
        named: the tensors that are trained, by name.
    """

    def __init__(self, named: Mapping[str, Tensor], fabric: Any) -> None:
        self.named = {name: tensor for name, tensor in named.items() if tensor.numel()}
        self.fabric = fabric
        self.at_once = fabric.world_size == 1 and fabric.device.type == "cpu"
        self._pending: tuple[Tensor, Any, list[str], float, str] | None = None

    def watch(self, loss: float, where: str) -> None:
        """Record a step's loss and the current gradients; `where` names the step in messages."""
        self.check()
        gradients = {name: tensor.grad for name, tensor in self.named.items() if tensor.grad is not None}
        norms = torch._foreach_norm(list(gradients.values())) if gradients else []
        bad = ~torch.stack([*(norm.float() for norm in norms), torch.zeros((), device=self.fabric.device)]).isfinite()
        bad[-1] = not math.isfinite(loss)
        flags, work = bad.float(), None
        if self.fabric.world_size > 1:
            work = torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, async_op=True)
        self._pending = flags, work, list(gradients), loss, where
        if self.at_once:
            self.check()

    def check(self) -> None:
        """Raise `Diverged` if the numbers recorded last are not finite."""
        if self._pending is None:
            return
        flags, work, names, loss, where = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        *gradients, bad_loss = flags.tolist()
        if bad_loss:
            event = f"the loss became {loss}" if not math.isfinite(loss) else "the loss of another process became NaN"
            raise Diverged(f"{event} in {where}: try a smaller one")
        wrong = [name for name, bad in zip(names, gradients, strict=True) if bad]
        if wrong:
            raise Diverged(f"the gradient of {listed(wrong)} became NaN or infinite in {where}: try a smaller one")


def check_weights(named: Mapping[str, Tensor], where: str) -> None:
    """Raise `Diverged` if a tensor holds NaN or infinity."""
    wrong = unfinite(named)
    if wrong:
        raise Diverged(f"{listed(wrong)} became NaN or infinite in {where}: try a smaller one")


def unfinite(named: Mapping[str, Tensor]) -> list[str]:
    """The names of floating tensors that hold NaN or infinity; one synchronisation with the device if none does."""
    floating = {name: tensor for name, tensor in named.items() if tensor.is_floating_point() and tensor.numel()}
    if not floating:
        return []
    norms = torch._foreach_norm([tensor.detach() for tensor in floating.values()])
    if bool(torch.stack([norm.double() for norm in norms]).isfinite().all()):
        return []
    return [name for name, tensor in floating.items() if not bool(tensor.isfinite().all())]  # a norm may overflow


def listed(names: Iterable[str]) -> str:
    """A list of names, shortened for messages."""
    first, *others = names
    return first if not others else f"{first} and {len(others)} more"
