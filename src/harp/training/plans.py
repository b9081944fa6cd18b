"""The length of a training in another library's loop, as methods want to know it."""

import math

from torch.optim import Optimizer

from harp.pruning.methods import Plan


def plan_of(optimizer: Optimizer, steps: float, epochs: float | None) -> Plan | None:
    """The plan of a training of so many optimiser steps in all; None if nobody knows how many."""
    if not 0 < steps < math.inf:
        return None
    parts = round(epochs) if epochs is not None and 1 <= epochs <= steps else 1
    group = optimizer.param_groups[0]
    momentum = group.get("momentum", group.get("betas", (0.0,))[0])
    return Plan(parts, math.ceil(steps / parts), group["lr"], momentum, group.get("weight_decay", 0.0))
