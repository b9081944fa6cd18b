"""Pruning in Lightning's Trainer: one callback.

trainer = lightning.Trainer(callbacks=[PruningCallback(harp.Harp(harp.Weights(module), keep=0.01))])
"""

from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any

import torch

from harp.errors import MissingExtra, ModelError
from harp.models.external import import_torchvision
from harp.pruning.masks import Masks
from harp.pruning.methods import Pruner
from harp.training.plans import plan_of

with suppress(MissingExtra):  # the library imports torchvision if it is there, and must find one that works
    import_torchvision()
try:
    Callback: Any = import_module("lightning.pytorch").Callback
except ModuleNotFoundError:
    try:  # the same library by its older name
        Callback = import_module("pytorch_lightning").Callback
    except ModuleNotFoundError as error:
        raise MissingExtra('Lightning is not installed: pip install "harp-prune[lightning]"') from error


class PruningCallback(Callback):  # type: ignore[misc]  # a class that is found only when it is imported
    """Prune what Lightning trains.

    The pruner takes over the optimiser when training starts, and writes the model's weights after every step.
    Validation sees the weights that would be kept. A checkpoint holds the pruner's state within the optimiser's.
    At the end of training the model holds the final weights, exactly within budget.

    Arguments:
        pruner: of the module that is trained, or of a network inside it if nothing else in the module learns.

    Example:
        callback = PruningCallback(harp.Harp(harp.Weights(module), keep=0.01))
        lightning.Trainer(max_epochs=20, callbacks=[callback]).fit(module, loader)
        masks = callback.masks
    """

    def __init__(self, pruner: Pruner) -> None:
        self.pruner = pruner
        self.masks: Masks | None = None  # the result, after the training
        self._exact = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over the optimiser. Its state is restored after that."""
        if len(trainer.optimizers) != 1:
            raise ModelError(f"the module has {len(trainer.optimizers)} optimisers, a pruner takes over one")
        if trainer.world_size > 1:
            raise ModelError(f"{trainer.world_size} processes: harp.fit prunes in several, this callback in one")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ModelError("precision 16-mixed scales gradients that the pruner needs: use bf16-mixed")
        optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
        plan = plan_of(optimizer, trainer.estimated_stepping_batches, trainer.max_epochs)
        self.pruner.take_over(optimizer, plan).after_steps(self.pruner.after_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Give the pruner an image, which some methods trace through the network."""
        images = batch[0] if isinstance(batch, (list, tuple)) and batch else None
        if self.pruner.example is None and isinstance(images, torch.Tensor):
            self.pruner.example = images[:1].detach()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Pull the gradients back, before Lightning clips those of what is stepped."""
        self.pruner.after_backward()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the weights that would be kept."""
        if trainer.state.fn == "fit":
            self._exact.enter_context(self.pruner.exact())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Go on with the weights of the training."""
        self._exact.close()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the pruner's numbers through the module; update what changes once an epoch."""
        if metrics := self.pruner.metrics():
            pl_module.log_dict(metrics)
        self.pruner.after_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the final weights in the model."""
        self.masks = self.pruner.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the weights of the training in the model if validation fails."""
        self._exact.close()
