"""The callback in the Trainer of transformers, on a network that trains against PGD."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harp
from harp.errors import MissingExtra, ModelError
from support import cases
from support.documents import blocks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from harp.training.transformers import PruningCallback
    except MissingExtra as error:
        pytest.skip(str(error), allow_module_level=True)
    hf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

KEEP = 0.1
EPOCHS = 4
STEPS = 3  # an epoch, of two batches each

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers say nothing about the callback


class Robust(nn.Module):
    """A network whose loss is that of attacked images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cases.build("conv")
        self.net.classifier[2].p = 0.0
        self.attack = harp.Pgd(epsilon=0.1, step=0.05, steps=2, random_start=False)
        self.kept_in_evaluation: list[int] = []
        self.batches: list[tuple[Tensor, Tensor]] = []

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.batches.append((pixel_values, labels))
            pixel_values = self.attack(self.net, pixel_values, labels)
        else:
            self.kept_in_evaluation.append(kept(self))
        logits = self.net(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def images() -> list[dict[str, Tensor]]:
    return [{"pixel_values": x, "labels": y} for x, y in zip(*cases.batch(24), strict=True)]


def kept(module: nn.Module) -> int:
    return sum(int(weight.count_nonzero()) for weight in harp.Weights(module).weights)


def trained(
    folder: Path, method: str, *callbacks: Any, resume: Path | None = None, **options: Any
) -> tuple[Robust, PruningCallback, Any]:
    model = Robust()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = getattr(harp, method)(harp.Weights(model), keep=KEEP)
    callback = PruningCallback(pruner, optimizer)
    settings: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "max_grad_norm": 0.5,
        "remove_unused_columns": False,
    }
    arguments = hf.TrainingArguments(output_dir=str(folder), **{**settings, **options})
    data = images()
    trainer = hf.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:8], optimizers=(optimizer, None), callbacks=[callback]
    )
    for other in callbacks:
        trainer.add_callback(other)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return model, callback, trainer


@pytest.mark.parametrize("method", ["Harp", "Hydra", "Magnitude", "Tandem"])
def test_the_budget_is_exact_whatever_the_trainer_does(tmp_path, method):
    model, callback, _ = trained(tmp_path, method, bf16=True, eval_strategy="epoch")
    assert callback.masks is not None
    assert kept(model) <= sum(int(mask.sum()) for mask in callback.masks.values()) == callback.pruner.total
    for name, mask in callback.masks.items():
        assert not model.get_parameter(name)[~mask].any()


@pytest.mark.parametrize("when", ["epoch", "steps"])
def test_an_evaluation_sees_the_weights_that_would_be_kept(tmp_path, when):
    class Watch(hf.TrainerCallback):
        seen: list[int] = []  # noqa: RUF012 (one test)

        def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
            self.seen.append(kept(model))

    model, callback, _ = trained(tmp_path, "Harp", Watch(), eval_strategy=when, eval_steps=2)
    assert model.kept_in_evaluation and set(model.kept_in_evaluation) == {callback.pruner.total}
    assert Watch.seen[4] > callback.pruner.total  # between evaluations: the budget is not reached yet


@pytest.mark.parametrize("method", ["Harp", "Hydra", "Magnitude"])
def test_it_trains_as_a_loop_of_ones_own(tmp_path, method):
    model, _, _ = trained(tmp_path, method, max_grad_norm=0.0, lr_scheduler_type="constant")
    other = Robust()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    own = getattr(harp, method)(harp.Weights(other), keep=KEEP)
    own.take_over(optimizer, harp.Plan(EPOCHS, STEPS, 0.1, 0.9, 0.0))
    for number in range(EPOCHS * STEPS):
        other.zero_grad()
        for part in model.batches[2 * number : 2 * number + 2]:
            (other(*part)["loss"] / 2).backward()
        own.after_backward()
        optimizer.step()
        own.after_step()
        if number % STEPS == STEPS - 1:
            own.after_epoch()
    own.finish()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize("method", ["Harp", "Hydra", "Magnitude"])
def test_a_resumed_training_ends_with_the_same_bits(tmp_path, method):
    class Stop(hf.TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = control.should_training_stop = state.epoch >= 2

    whole, first, _ = trained(tmp_path / "whole", method)
    trained(tmp_path / "half", method, Stop())
    resumed, second, _ = trained(tmp_path / "half", method, resume=tmp_path / "half" / f"checkpoint-{2 * STEPS}")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    assert first.masks is not None and second.masks is not None
    assert all(torch.equal(mask, second.masks[name]) for name, mask in first.masks.items())


def test_the_best_checkpoint_comes_with_its_own_masks(tmp_path):
    class Worse(hf.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            metrics["eval_loss"] = state.epoch  # the first epoch is the best

    options = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    options |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    model, callback, trainer = trained(tmp_path, "Hydra", Worse(), **options)
    best = torch.load(tmp_path / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)["pruner"]
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{STEPS}")
    assert callback.masks is not None
    for name, tensor in callback.pruner.state_dict().items():
        if isinstance(tensor, Tensor):
            assert torch.equal(tensor, best[name]), name
    assert kept(model) <= callback.pruner.total


def test_numbers_of_an_epoch_are_reported(tmp_path):
    model, records = Robust(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = PruningCallback(harp.Harp(harp.Weights(model), keep=KEEP), optimizer, on_epoch=records.append)
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = hf.TrainingArguments(**options, num_train_epochs=2, save_strategy="no")
    hf.Trainer(model, arguments, train_dataset=images(), optimizers=(optimizer, None), callbacks=[callback]).train()
    assert [record["epoch"] for record in records] == [1, 2]
    assert all({"budget_loss", "rate"} <= set(record) for record in records)


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("docs/how-to/trainers.md", "py")
    quick = example.replace("num_train_epochs=20", "num_train_epochs=1, use_cpu=True, report_to=[]")
    scope: dict[str, Any] = {"model": Robust(), "images": images()}
    exec(compile(quick.replace("0.01", "0.1"), "docs/how-to/trainers.md", "exec"), scope)
    assert harp.load_masks("masks.safetensors").keys() == scope["callback"].masks.keys()


def test_an_early_end_leaves_the_exact_budget(tmp_path):
    model, callback, _ = trained(tmp_path, "Harp", max_steps=2)
    assert callback.masks is not None and kept(model) <= callback.pruner.total


def test_what_can_not_be_pruned_is_refused(tmp_path):
    with pytest.raises(ModelError, match="save_only_model"):
        options = {"load_best_model_at_end": True, "save_only_model": True}
        trained(tmp_path, "Hydra", **options, eval_strategy="epoch", save_strategy="epoch")
    model = Robust()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = PruningCallback(harp.Hydra(harp.Weights(model), keep=KEEP), optimizer)
    arguments = hf.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    with pytest.raises(ModelError, match="another optimiser"):
        hf.Trainer(model, arguments, train_dataset=images(), callbacks=[callback]).train()
