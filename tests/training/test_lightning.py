"""The callback in Lightning's own Trainer, on a module that trains against PGD."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import harp
from harp.errors import CheckpointError, MissingExtra, ModelError, RecipeError
from support import cases
from support.documents import blocks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from harp.training.lightning import PruningCallback
    except MissingExtra as error:
        pytest.skip(str(error), allow_module_level=True)
    L = pytest.importorskip("lightning.pytorch")

KEEP = 0.1

# Lightning's advice about workers, logging and the like says nothing about the callback.
pytestmark = pytest.mark.filterwarnings("ignore")


class Robust(L.LightningModule):
    """Adversarial training in three lines of a module."""

    def __init__(self, schedule: bool = False) -> None:
        super().__init__()
        self.net = cases.build("conv")
        self.net.classifier[2].p = 0.0
        self.attack = harp.Pgd(epsilon=0.1, step=0.05, steps=2, random_start=False)
        self.schedule = schedule
        self.kept_in_validation: list[int] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(self.attack(self.net, x, y)), y)

    def validation_step(self, batch: Any, _: int) -> None:
        self.kept_in_validation.append(kept(self))
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*cases.batch(24)), batch_size=4)


def kept(module: nn.Module) -> int:
    return sum(int(weight.count_nonzero()) for weight in harp.Weights(module).weights)


def pruner_of(module: nn.Module, method: str = "Hydra") -> harp.Pruner:
    pruner: harp.Pruner = getattr(harp, method)(harp.Weights(module), keep=KEEP)
    return pruner


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 2, "enable_checkpointing": False, "accelerator": "cpu", **quiet, **options}
    return L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **options)


@pytest.fixture(autouse=True)
def _grad_mode() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("method", ["Harp", "Hydra", "Magnitude", "Tandem"])
def test_the_budget_is_exact_whatever_the_trainer_does(tmp_path, method):
    module = Robust(schedule=True)
    callback = PruningCallback(pruner_of(module, method))
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed", "max_epochs": 3}
    trainer(tmp_path, callback, **options).fit(module, loader(), loader())
    assert callback.masks is not None
    assert kept(module) <= sum(int(mask.sum()) for mask in callback.masks.values()) == callback.pruner.total
    for name, mask in callback.masks.items():
        assert not module.get_parameter(name)[~mask].any()


def test_validation_sees_the_weights_that_would_be_kept(tmp_path):
    module = Robust()
    callback = PruningCallback(pruner_of(module, "Harp"))
    seen: list[int] = []
    callback.on_train_batch_end = lambda *_: seen.append(kept(module))  # type: ignore[method-assign]
    trainer(tmp_path, callback, max_epochs=2, num_sanity_val_steps=0).fit(module, loader(), loader())
    assert module.kept_in_validation and set(module.kept_in_validation) == {callback.pruner.total}
    assert seen[6] > callback.pruner.total  # the first step of the second epoch: the budget is not reached yet


@pytest.mark.parametrize("method", ["Hydra", "Harp"])
def test_it_trains_as_a_loop_of_ones_own(tmp_path, method):
    module = Robust(schedule=True)
    pruner = pruner_of(module, method)
    trainer(tmp_path, PruningCallback(pruner), max_epochs=4, accumulate_grad_batches=2).fit(module, loader())

    other = Robust(schedule=True)
    (optimizer,), (schedule,) = other.configure_optimizers()
    own = pruner_of(other, method)
    own.take_over(optimizer, harp.Plan(4, 3, 0.1, 0.9, 0.0))
    batches = list(loader())
    own.example = batches[0][0][:1]
    for _ in range(4):
        for first in (0, 2, 4):
            optimizer.zero_grad()
            for number in (first, first + 1):
                (other.training_step(batches[number], number) / 2).backward()
            own.after_backward()
            optimizer.step()
            own.after_step()
        own.after_epoch()
        schedule.step()
    own.finish()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name]), name


@pytest.mark.parametrize("method", ["Hydra", "Harp", "Magnitude"])
def test_a_resumed_training_ends_with_the_same_bits(tmp_path, method):
    def trained(epochs: int, start: Path | None = None) -> tuple[nn.Module, Any]:
        module = Robust(schedule=True)
        callback = PruningCallback(pruner_of(module, method))
        run = trainer(tmp_path, callback, max_epochs=4)
        if epochs < 4:
            run.limit_train_batches = 1.0
            run.callbacks.append(_Save(tmp_path / "half.ckpt", epochs))
        run.fit(module, loader(), ckpt_path=start)
        return module, callback

    whole, first = trained(4)
    trained(2)
    resumed, second = trained(4, tmp_path / "half.ckpt")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    assert all(torch.equal(mask, second.masks[name]) for name, mask in first.masks.items())


class _Save(L.Callback):
    """Saves a checkpoint after so many epochs, and stops."""

    def __init__(self, path: Path, epochs: int) -> None:
        self.path, self.epochs = path, epochs

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch + 1 == self.epochs:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def test_the_modules_logger_gets_the_pruners_numbers(tmp_path):
    module = Robust()
    run = trainer(tmp_path, PruningCallback(pruner_of(module, "Harp")))
    run.fit(module, loader())
    assert {"budget_loss", "rate"} <= set(run.logged_metrics)


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("docs/how-to/trainers.md", "python")
    quick = example.replace("max_epochs=20", "max_epochs=1, accelerator='cpu', logger=False").replace("0.01", "0.1")
    scope: dict[str, Any] = {"net": cases.build("conv"), "loader": loader()}
    exec(compile(quick.replace("steps=10", "steps=1"), "docs/how-to/trainers.md", "exec"), scope)
    assert harp.load_masks("masks.safetensors").keys() == scope["callback"].masks.keys()


def test_an_early_end_leaves_the_exact_budget(tmp_path):
    module = Robust()
    callback = PruningCallback(pruner_of(module, "Harp"))
    trainer(tmp_path, callback, max_epochs=50, max_steps=2).fit(module, loader())
    assert callback.masks is not None and kept(module) <= callback.pruner.total


def test_what_can_not_be_pruned_is_refused(tmp_path):
    module = Robust()
    module.configure_optimizers = lambda: [torch.optim.SGD(module.parameters(), 0.1) for _ in range(2)]
    module.automatic_optimization = False
    with pytest.raises(ModelError, match="2 optimisers"):
        trainer(tmp_path, PruningCallback(pruner_of(module))).fit(module, loader())
    changed = Robust()
    pruner = harp.AnpVs(harp.Weights(changed), keep=KEEP)
    with pytest.raises(ModelError, match=r"use harp\.fit"):
        trainer(tmp_path, PruningCallback(pruner)).fit(changed, loader())
    dense = Robust()
    run = trainer(tmp_path, max_epochs=1)
    run.fit(dense, loader())
    run.save_checkpoint(tmp_path / "dense.ckpt")
    with pytest.raises(CheckpointError, match="holds no pruner"):
        trainer(tmp_path, PruningCallback(pruner_of(dense))).fit(dense, loader(), ckpt_path=tmp_path / "dense.ckpt")


def test_a_schedule_of_other_parameter_groups_is_refused(tmp_path):
    module = Robust(schedule=True)
    pruner = harp.Harp(harp.Weights(module), keep=KEEP, published=True)
    with pytest.raises(RecipeError, match="made for the 1 parameter groups"):
        trainer(tmp_path, PruningCallback(pruner)).fit(module, loader())
