"""AutoAttack: four attacks of different kinds, each on the images that the ones before did not fool.

Croce & Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks", ICML
2020: APGD on the cross entropy, APGD and FAB towards nine classes each, and the square attack. An image is robust if
none of them finds a misclassified point in its ball. This is the "standard" version with 100 steps and 5000 queries, in
the maximum and in the Euclidean norm.

Departures from the authors' code: those of the parts; and with fewer than ten classes there are as many targets as
other classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from harp.attacks.apgd import Apgd, ApgdT
from harp.attacks.batched import Packing, Stepwise
from harp.attacks.fab import Fab
from harp.attacks.fast_forward import frozen
from harp.attacks.square import Square
from harp.attacks.threat import check_ball, images_in_box, logits
from harp.system.seeds import derive


@dataclass(frozen=True)
class AutoAttack:
    """The standard version of AutoAttack (Croce & Hein 2020).

    `parts` are the attacks. To save in between, run each with a `Packing` on the images that the ones before left.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.

    Example:
        attack = harp.AutoAttack(epsilon=8 / 255)
        print([part.name for part in attack.parts(classes=10)])
    """

    epsilon: float = 8 / 255
    norm: str = "linf"
    fast: bool = True

    name: ClassVar[str] = "autoattack"

    def __post_init__(self) -> None:
        check_ball(self)

    def parts(self, classes: int) -> Sequence[Stepwise]:
        """The attacks on a network with `classes` classes, in their order."""
        ball = self.epsilon, self.norm
        # As in the authors' ensemble, the schedule of the square attack stays that for 10 000 queries.
        return (
            Apgd(*ball, fast=self.fast),
            ApgdT(*ball, fast=self.fast),
            Fab(*ball, fast=self.fast),
            Square(*ball, rescaled=False, fast=self.fast),
        )

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The best points found in the balls around `x`; the seed is drawn from torch's generator."""
        with torch.inference_mode(False), torch.no_grad():
            x, y = images_in_box(x, y, model), y.clone()
            seed = int(torch.randint(2**62, (1,)))
            if self.epsilon == 0 or len(x) == 0:
                return x
            points, left = x.clone(), torch.arange(len(x), device=x.device)
            with frozen(model, x, fast=self.fast) as net:
                for part in self.parts(logits(net, x[:1]).shape[1]):
                    own = derive(seed, part.name)
                    packing = Packing(part, net, x[left], y[left], batch=len(x), seed=own, model=model)
                    packing.run()
                    points[left] = packing.points
                    left = left[~packing.fooled]
                    if len(left) == 0:
                        break
            return points


@dataclass(frozen=True)
class AutoAttackLite(AutoAttack):
    """The two APGD attacks of AutoAttack. It is not AutoAttack: its robust accuracies are upper bounds.

    FAB and the square attack are four fifths of the cost of AutoAttack. On networks without masked gradients they
    rarely find anything that APGD has not found.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.

    Example:
        attack = harp.AutoAttackLite(epsilon=8 / 255)
        print([part.name for part in attack.parts(classes=10)])
    """

    name: ClassVar[str] = "aa-lite"

    def parts(self, classes: int) -> Sequence[Stepwise]:
        """The attacks on a network with `classes` classes, in their order."""
        return super().parts(classes)[:2]
