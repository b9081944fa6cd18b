"""Pruning in the Trainer of Hugging Face's transformers: one callback, and the optimiser that it shares with it.

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
callback = PruningCallback(harp.Harp(harp.Weights(model), keep=0.01), optimizer)
trainer = transformers.Trainer(model, args, optimizers=(optimizer, None), callbacks=[callback], ...)
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from harp.errors import MissingExtra, ModelError
from harp.models.external import import_torchvision
from harp.pruning.masks import Masks
from harp.pruning.methods import Pruner
from harp.training.plans import plan_of

with suppress(MissingExtra):  # the library imports torchvision if it is there, and must find one that works
    import_torchvision()
try:
    TrainerCallback: Any = import_module("transformers").TrainerCallback
except ModuleNotFoundError as error:
    raise MissingExtra('transformers is not installed: pip install "harp-prune[transformers]"') from error


class PruningCallback(TrainerCallback):  # type: ignore[misc]  # a class that is found only when it is imported
    """Prune what a `transformers.Trainer` trains.

    The pruner takes over the optimiser at once, because the trainer makes its schedule and restores its state before
    the first event. Evaluations during the training see the weights that would be kept. The trainer's checkpoints hold
    the pruner's state within the optimiser's. At the end the model holds the final weights, exactly within budget.

    Arguments:
        pruner: of the model that is trained.
        optimizer: that is given to the trainer as `optimizers=(optimizer, None)`.
        on_epoch: called with the epoch and the pruner's numbers after each epoch, such as `wandb.log`.

    Example:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        callback = PruningCallback(harp.Harp(harp.Weights(model), keep=0.01), optimizer)
        transformers.Trainer(model, args, optimizers=(optimizer, None), callbacks=[callback]).train()
        masks = callback.masks
    """

    def __init__(
        self, pruner: Pruner, optimizer: Optimizer, on_epoch: Callable[[dict[str, Any]], object] | None = None
    ) -> None:
        self.pruner, self.optimizer, self.report = pruner, optimizer, on_epoch
        self.masks: Masks | None = None  # the result, after the training
        self._exact = ExitStack()
        pruner.attach(optimizer)

    def on_init_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Follow the model to its device."""
        self.pruner.to(self.pruner.units.weights[0].device)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **context: Any) -> None:
        """Check the trainer, and tell the pruner the length of the training."""
        if getattr(optimizer, "optimizer", optimizer) is not self.optimizer:
            raise ModelError(
                "the trainer steps another optimiser: give it the callback's, optimizers=(optimizer, None)"
            )
        if args.world_size > 1:
            raise ModelError(f"{args.world_size} processes: harp.fit prunes in several, this callback in one")
        if args.fp16:
            raise ModelError("fp16 scales gradients that the pruner needs: use bf16")
        if args.load_best_model_at_end and args.save_only_model:
            raise ModelError("load_best_model_at_end needs the pruner's state of that epoch: leave out save_only_model")
        self.pruner.start(plan_of(self.optimizer, state.max_steps, state.num_train_epochs))

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Before an evaluation, put the weights that would be kept into the model."""
        if control.should_evaluate:
            self._exact.enter_context(self.pruner.exact())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Report the pruner's numbers, and update what changes once an epoch; then as after a step."""
        if self.report is not None:
            self.report({"epoch": round(state.epoch), **self.pruner.metrics()})
        self.pruner.after_epoch()
        self.on_step_end(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Go on with the weights of the training."""
        self._exact.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Leave the final weights in the model, those of the best checkpoint if the trainer went back to it."""
        self._exact.close()
        best = state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None:
            kept = torch.load(Path(best, "optimizer.pt"), map_location="cpu", weights_only=True)
            self.pruner.load_state_dict(kept["pruner"])
        self.masks = self.pruner.finish()
