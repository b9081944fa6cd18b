"""Names of methods, models and data sets."""

from typing import Any

import pytest

from harp.experiments import recipe
from harp.pruning.methods import PRUNERS
from harp.reports import names
from support.finished_run import content


@pytest.mark.parametrize(
    ("pruner", "said"),
    [
        ({"name": "harp", "keep": 0.1}, "HARP"),
        ({"name": "harp-s"}, "HARP-S"),
        ({"name": "hydra", "strategy": "lamp"}, "HYDRA + LAMP"),
        ({"name": "hydra", "strategy": {"conv1": 0.5}}, "HYDRA + given rates"),
        ({"name": "magnitude"}, "magnitude"),
        ({"name": "lamp"}, "LAMP"),
        ({"name": "somebody-elses"}, "somebody-elses"),
    ],
)
def test_methods_go_by_their_names(pruner: dict[str, Any], said: str) -> None:
    assert names.method(pruner) == said


def test_no_two_methods_have_one_name_and_all_are_short() -> None:
    said = [names.method({"name": name}) for name in PRUNERS]
    assert len(set(said)) == len(said) and max(map(len, said)) <= 14


def test_a_network_is_said_in_one_line() -> None:
    assert names.network("HARP, 10 %", "/home/me/my_net.py:Net", "cifar10") == "HARP, 10 % – my_net on CIFAR-10"
    assert names.data("imagenet") == "ImageNet" and names.data("mine/birds.npz") == "birds"
    assert names.run(recipe.parse(content(keep=0.005))) == "HARP, 0.5 % – resnet18 on CIFAR-10"
    assert names.run(recipe.parse(content(keep=None))) == "dense – resnet18 on CIFAR-10"
