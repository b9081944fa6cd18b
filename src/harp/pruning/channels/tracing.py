"""Following channels through a model: which entries of which weights live or die together.

The model is run once on an example, and every operation that reaches PyTorch's dispatcher is seen with its real
tensors, so any control flow in Python is simply followed. Beside each tensor goes a tensor of labels (`labels.py`),
which name the atoms (`atoms.py`) of its entries:

* data movement (views, permutations, concatenation, windows of a shifted transformer, …) is done to the labels as well;
* element-wise operations join the atoms of entries that meet: residual sums, gates, biases, norms' affine parameters;
* a convolution or a matrix product reads channels and gives new ones. Its reader's side joins the atoms it reads, and
  a grouped convolution joins what a group reads with what it gives;
* a product of two activations (attention) joins all that it sums over, so that a head is one atom;
* whatever mixes channels without a weight that could be masked (layer norm, a mean over channels), fixes a shape, or
  isn't known here, locks the channels it touches, and the reason names the operation and the line of the model.

So nothing is known here of any architecture, and nothing that isn't understood is ever pruned. Layers that run in
training only, such as auxiliary heads, are followed in a second run, so that they still fit when channels are cut out.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harp.channels.rules import Rules, outputs_of
from harp.channels.running import training, untouched
from harp.channels.traces import Trace
from harp.errors import ModelError
from harp.modes import slow_attention

logger = logging.getLogger("harp")


@torch.inference_mode(False)
@torch.no_grad()
def trace(model: nn.Module, example: Tensor) -> Trace:
    """Run the model in eval mode on the first image and follow its channels. The model is left as it was."""
    image = example[:1].clone()
    with slow_attention(), untouched(model):
        rules = Rules(model, image)
        watch = _Watch(rules)
        try:
            with watch:
                answer = model(image)
        except ModelError:
            raise
        except Exception as error:  # forward may do anything
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"the model can't run on an example of shape {tuple(image.shape)}: {reason}") from error
        rules.finish(answer)
        return rules.found(_follow_training(model, rules, image))


def _follow_training(model: nn.Module, rules: Rules, image: Tensor) -> bool:
    """Follow what else runs in training, if some parameters were not seen; whether there is such a thing."""
    uses, computed, sites = list(rules.uses), list(rules.computed), len(rules.axes)
    if rules.seen_all():
        return False
    training(model)
    try:
        with _Watch(rules):
            rules.finish(model(image))
    except Exception as error:  # it may want labels, or more than one image: then nothing is known of it
        logger.debug("training mode is not followed: %s", error)
    rules.uses, rules.computed = uses, computed  # costs are those of eval mode
    return len(rules.axes) > sites


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Lets the rules see every operation."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.rules = rules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # operations arrive here whole then
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
