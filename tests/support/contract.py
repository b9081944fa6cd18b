"""What every method promises, for one method and one model shape."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from harp.pruning import masks as mask_ops
from harp.pruning.methods import Pruner
from harp.pruning.units import Weights
from harp.training.loop import fit
from harp.training.objectives import Natural, PgdTraining
from support import cases
from support.methods import KEEP, VARIANTS, Memory, Three, assert_same_state, make, train


def fitted(method: str, case: str, keeper: Memory, **options: Any) -> tuple[nn.Module, Pruner]:
    model = cases.build(case)
    pruner = make(method, model)
    validation = lambda: {"robust": float(torch.rand(()))}  # noqa: E731
    settings: dict[str, Any] = {"epochs": 3, "lr": 0.05, "validate": validation, "select": "robust", **options}
    fit(model, Three(), PgdTraining(steps=2), pruner, keeper=keeper, **settings)
    return model, pruner


def budget_is_exact_and_model_stays_plain(method: str, case: str) -> None:
    model = cases.build(case)
    keys = list(model.state_dict())
    pruner = make(method, model)
    keep = VARIANTS[method][1]["keep"] if method in VARIANTS else KEEP
    for steps in (0, 1, 3):
        train(model, pruner, steps)
        answer = pruner.masks()
        assert mask_ops.kept(answer) == pruner.total
        rounded, cut = Weights(model).total(keep), int(keep * sum(pruner.units.sizes))
        assert pruner.total == (cut if method == "bcs-p" else rounded)  # its paper cuts where the others round
        assert list(answer) == pruner.units.names
        with pruner.exact():
            assert sum(int(w.count_nonzero()) for w in pruner.units.weights) <= pruner.total
            assert all(not w[~answer[n]].any() for n, w in zip(pruner.units.names, pruner.units.weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(answer.values(), pruner.masks().values(), strict=True)), "idempotent"
    assert list(model.state_dict()) == keys
    finished = pruner.finish()
    assert all(not w[~finished[n]].any() for n, w in zip(pruner.units.names, pruner.units.weights, strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())


def model_can_be_copied_and_pickled(method: str, case: str) -> None:
    model = cases.build(case)
    pruner = make(method, model)
    train(model, pruner, 2)
    x, _ = cases.batch()
    expected = model.eval()(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
    both, learner = copy.deepcopy((model, pruner))
    assert learner.units.model is both
    assert all(torch.equal(a, b) for a, b in zip(learner.masks().values(), pruner.masks().values(), strict=True))


def resumed_equals_uninterrupted(method: str, case: str) -> None:
    expected, pruner = fitted(method, case, Memory())
    for stop_after in (2, 6):  # in the middle of an epoch, and at the end of one
        keeper = Memory(stop_after)
        with pytest.raises(InterruptedError):
            fitted(method, case, keeper)
        model, resumed = fitted(method, case, Memory(state=keeper.state))
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        assert all(torch.equal(a, b) for a, b in zip(resumed.masks().values(), pruner.masks().values(), strict=True))
        assert_same_state(resumed, pruner)


def earlier_gradients_do_not_count(method: str, case: str) -> None:
    def trained(stale: str) -> dict[str, torch.Tensor]:
        model = cases.build(case)
        for parameter in model.parameters() if stale == "before the pruner" else ():
            parameter.grad = torch.full_like(parameter, 100.0)
        pruner = make(method, model)
        for parameter in model.parameters() if stale == "before fit" else ():
            parameter.grad = torch.full_like(parameter, 100.0)
        if stale == "before fit":
            fit(model, [cases.batch()], Natural(), pruner, epochs=1)
        else:
            train(model, pruner, 2)
        return model.state_dict()

    def fitted() -> dict[str, torch.Tensor]:
        model = cases.build(case)
        fit(model, [cases.batch()], Natural(), make(method, model), epochs=1)
        return model.state_dict()

    for result, expected in ((trained("before the pruner"), trained("no")), (trained("before fit"), fitted())):
        assert all(torch.equal(result[name], expected[name]) for name in expected)
