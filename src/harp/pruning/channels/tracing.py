"""Tracing channels through a model: which entries of which weights can only be removed together.

The model runs once on an example, and every operation is seen at PyTorch's dispatcher with its real tensors, so control
flow in Python needs no special treatment. Every tensor has a tensor of labels (`labels.py`), which name the atoms
(`atoms.py`) of its entries:

* data movement (views, permutations, concatenation, windows of a shifted transformer, …) moves the labels as well;
* element-wise operations join the atoms of their operands: residual sums, gates, biases, norms' affine parameters;
* a convolution or a matrix product reads channels and writes new ones. The input axis of its weight joins the atoms
  that it reads, and a grouped convolution joins the channels that a group reads with those that it writes;
* a product of two activations (attention) joins all that it sums over, so that a head is one atom;
* an operation that mixes channels without a weight that could be masked (layer norm, a mean over channels), that fixes
  a shape, or that has no rule, locks the channels of its tensors; the reason names the operation and the model's line.

So there are no rules for architectures, and channels that are not understood are never pruned. Layers that run in
training only, such as auxiliary heads, are traced in a second run, so that they still fit when channels are cut out.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harp.errors import ModelError
from harp.models.modes import slow_attention
from harp.pruning.channels.dry_run import training, untouched
from harp.pruning.channels.rules import Rules, outputs_of
from harp.pruning.channels.traces import Trace

logger = logging.getLogger("harp")


@torch.inference_mode(False)
@torch.no_grad()
def trace(model: nn.Module, example: Tensor) -> Trace:
    """Run the model in eval mode on the first image and trace its channels. The model is not changed."""
    image = example[:1].clone()
    with slow_attention(), untouched(model):
        rules = Rules(model, image)
        try:
            with _RuleMode(rules):
                answer = model(image)
        except ModelError:
            raise
        except Exception as error:  # a model's forward may raise any error
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"the model can't run on an example of shape {tuple(image.shape)}: {reason}") from error
        rules.finish(answer)
        return rules.result(_trace_training(model, rules, image))


def _trace_training(model: nn.Module, rules: Rules, image: Tensor) -> bool:
    """Trace training mode too if some weights were not seen; return whether that has shown more."""
    uses, computed, sites = list(rules.uses), list(rules.computed), len(rules.axes)
    if rules.seen_all():
        return False
    training(model)
    try:
        with _RuleMode(rules):
            rules.finish(model(image))
    except Exception as error:  # training mode may need labels or several images: then it is not traced
        logger.debug("training mode is not followed: %s", error)
    rules.uses, rules.computed = uses, computed  # costs are those of eval mode
    return len(rules.axes) > sites


class _RuleMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Applies the rules to every operation."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.rules = rules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # composite operations are not decomposed then
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [tensor for tensor in inputs if self.rules.is_known(tensor)]
        if known:
            constant = all(id(tensor) in self.rules.origin or id(tensor) not in self.rules.records for tensor in known)
            self.rules.written(func, args, known)
            self.rules.rule(func)(func, args, kwargs, inputs, result)
            for tensor in outputs_of(result) if constant else ():
                self.rules.origin.setdefault(id(tensor), "computed")
        return result
