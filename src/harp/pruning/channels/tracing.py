"""Tracing channels through a model: which entries of which weights can only be removed together.

The model runs once on an example, and every operation is seen at PyTorch's dispatcher with its real tensors, so control
flow in Python needs no special treatment. Every tensor has a tensor of labels (`labels.py`), which name the atoms of
its entries:

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
from functools import partial

import torch
from torch import nn

from harp.errors import ModelError
from harp.models.inputs import Inputs, ask, copied, described, first_rows, tensors
from harp.models.modes import slow_attention, untouched
from harp.pruning.channels import rules
from harp.pruning.channels.forward import first_line, training
from harp.pruning.channels.labelled_run import LabelledRun
from harp.pruning.channels.traces import Trace
from harp.pruning.operations import Watcher

logger = logging.getLogger("harp")


@torch.inference_mode(False)
@torch.no_grad()
def trace(model: nn.Module, example: Inputs) -> Trace:
    """Run the model in eval mode on the first example and trace its channels. The model is not changed."""
    inputs = copied(first_rows(example, 1))
    with slow_attention(), untouched(model):
        run = LabelledRun(model, tensors(inputs))
        try:
            with Watcher(partial(rules.follow, run)):
                answer = ask(model, inputs)
        except ModelError:
            raise
        except Exception as error:  # a model's forward may raise any error
            given = described(inputs)
            raise ModelError(f"the model can't run on an example of {given}: {first_line(error)}") from error
        run.finish(answer)
        return run.result(not run.seen_all() and _trace_training(model, run, inputs))


def _trace_training(model: nn.Module, run: LabelledRun, inputs: Inputs) -> bool:
    """Trace training mode too, in which more weights may be used; whether there are such weights."""
    uses, computed, sites = list(run.uses), list(run.computed), len(run.axes)
    training(model)
    try:
        with Watcher(partial(rules.follow, run)):
            run.finish(ask(model, inputs))
    except Exception as error:  # training mode may need labels or several images: then it is not traced
        logger.debug("training mode is not followed: %s", error)
    run.uses, run.computed = uses, computed  # costs are those of eval mode
    return len(run.axes) > sites
