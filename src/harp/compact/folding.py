"""Batch norms put into the layers before them: what an eval-mode network computes, in fewer numbers."""

from torch import Tensor, fx, nn

from harp.errors import ModelError
from harp.frozen import FoldedLayer, frozen


def fold(model: nn.Module, example: Tensor) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A network's tensors without the batch norms that fold away, and which layer took which norm.

    A layer with a norm behind it gets the weight and the bias of both, under its own name: zeros stay zeros, so masks
    hold as before. Norms that don't directly follow a convolution or linear layer of their own stay as they are. The
    folded network was compared with the model on `example`, a batch of images; it is the same up to rounding.
    """
    with frozen(model, example) as net:
        if not isinstance(net, fx.GraphModule):
            raise ModelError(
                "the batch norms can't be folded: the model can't be traced, or folding changes its answers"
            )
        layers = [child for child in net.children() if isinstance(child, FoldedLayer) and child.norm is not None]
        names = {id(module): name for name, module in model.named_modules()}
        tensors = dict(model.state_dict())
        took = {}
        for each in layers:
            layer, norm = names[id(each.layer)], names[id(each.norm)]
            took[layer] = norm
            # Copies: the network keeps the memory and writes to it again.
            tensors[f"{layer}.weight"] = each.weight.clone().contiguous()
            if each.bias is not None:
                tensors[f"{layer}.bias"] = each.bias.clone()
    inside = tuple(f"{norm}." for norm in took.values())
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(inside)}, took
