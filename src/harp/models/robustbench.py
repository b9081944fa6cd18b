"""The architectures of RobustBench's names: a checkpoint says neither its activation nor its normalisation.

`robustbench:NAME:FILE` is short for a model of ours, its normalisation and the weights in the file. Names are those of
RobustBench, for CIFAR-10 unless they begin with `cifar100/`. `l2/` is before the one name that two threats share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Normalisation = tuple[list[float], list[float]]

# The constants differ between the codes that trained these networks, some in the third digit.
_TEN: Normalisation = ([0.4914, 0.4822, 0.4465], [0.2471, 0.2435, 0.2616])
_TEN_COARSE: Normalisation = ([0.491, 0.482, 0.447], [0.247, 0.243, 0.262])
_TEN_FINE: Normalisation = (
    [0.4913997551666284, 0.48215855929893703, 0.4465309133731618],
    [0.24703225141799082, 0.24348516474564, 0.26158783926049628],
)
_HUNDRED: Normalisation = ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762])
_HUNDRED_COARSE: Normalisation = ([0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761])
_HUNDRED_FINE: Normalisation = (
    [0.5070751592371323, 0.48654887331495095, 0.4409178433670343],
    [0.2673342858792401, 0.2564384629170883, 0.27615047132568404],
)
_TO_ONE: Normalisation = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])


@dataclass(frozen=True)
class Published:
    """A model of the table `harp.models.MODELS`, its options and its normalisation."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    normalize: Normalisation | None = None


def _wrn(depth: int, widen: int, normalize: Normalisation | None = None) -> Published:
    return Published("wrn", {"depth": depth, "widen": widen}, normalize)


def _swish(depth: int, widen: int, normalize: Normalisation = _TEN) -> Published:
    return Published("swish-wrn", {"depth": depth, "widen": widen}, normalize)


_RESNET18 = Published("resnet18")
_SWISH_18, _SWISH_18_HUNDRED = (Published("swish-preact-resnet18", {}, norm) for norm in (_TEN, _HUNDRED))

PUBLISHED: dict[str, Published] = {
    **dict.fromkeys(("Sehwag2021Proxy_R18", "Addepalli2021Towards_RN18", "Addepalli2022Efficient_RN18"), _RESNET18),
    **dict.fromkeys(
        (
            "Gowal2021Improving_R18_ddpm_100m",
            "Rade2021Helper_R18_ddpm",
            "Rade2021Helper_R18_extra",
            "Rebuffi2021Fixing_R18_cutmix_ddpm",
            "Rebuffi2021Fixing_R18_ddpm",
        ),
        _SWISH_18,
    ),
    "Wong2020Fast": Published("preact-resnet18", {"final_norm": False, "activated": False}, _TEN),
    "l2/Rice2020Overfitting": Published("preact-resnet18", {}, _TEN),
    **dict.fromkeys(
        (
            "Carmon2019Unlabeled",
            "Sehwag2020Hydra",
            "Sridhar2021Robust",
            "Standard",
            "Wang2020Improving",
            "Wu2020Adversarial_extra",
            "Zhang2020Geometry",
        ),
        _wrn(28, 10),
    ),
    "Hendrycks2019Using": _wrn(28, 10, _TO_ONE),
    "Rony2019Decoupling": _wrn(28, 10, _TEN_COARSE),
    **dict.fromkeys(
        (
            "Addepalli2021Towards_WRN34",
            "Addepalli2022Efficient_WRN_34_10",
            "Chen2021LTD_WRN34_10",
            "Chen2024Data_WRN_34_10",
            "Cui2020Learnable_34_10",
            "Cui2023Decoupled_WRN-34-10",
            "Huang2020Self",
            "Jia2022LAS-AT_34_10",
            "Sehwag2021Proxy",
            "Sitawarin2020Improving",
            "Wu2020Adversarial",
            "Zhang2019Theoretically",
            "Zhang2019You",
            "Zhang2020Attacks",
        ),
        _wrn(34, 10),
    ),
    "Augustin2020Adversarial_34_10": _wrn(34, 10, _TEN_FINE),
    "Augustin2020Adversarial_34_10_extra": _wrn(34, 10, _TEN_FINE),
    "Chen2020Efficient": _wrn(34, 10, _TEN),
    "Sridhar2021Robust_34_15": _wrn(34, 15),
    **dict.fromkeys(("Chen2021LTD_WRN34_20", "Chen2024Data_WRN_34_20", "Cui2020Learnable_34_20"), _wrn(34, 20)),
    "Rice2020Overfitting": _wrn(34, 20, _TEN),
    "Jia2022LAS-AT_70_16": _wrn(70, 16),
    **dict.fromkeys(
        (
            "Cui2023Decoupled_WRN-28-10",
            "Gowal2020Uncovering_28_10_extra",
            "Gowal2021Improving_28_10_ddpm_100m",
            "Pang2022Robustness_WRN28_10",
            "Rade2021Helper_ddpm",
            "Rebuffi2021Fixing_28_10_cutmix_ddpm",
            "Wang2023Better_WRN-28-10",
            "Xu2023Exploring_WRN-28-10",
        ),
        _swish(28, 10),
    ),
    "Rade2021Helper_extra": _swish(34, 10),
    "Gowal2020Uncovering_34_20": _swish(34, 20),
    **dict.fromkeys(
        (
            "Gowal2020Uncovering",
            "Gowal2020Uncovering_extra",
            "Gowal2020Uncovering_70_16",
            "Gowal2020Uncovering_70_16_extra",
            "Gowal2021Improving_70_16_ddpm_100m",
            "Pang2022Robustness_WRN70_16",
            "Rebuffi2021Fixing_70_16_cutmix_ddpm",
            "Rebuffi2021Fixing_70_16_cutmix_extra",
            "Wang2023Better_WRN-70-16",
        ),
        _swish(70, 16),
    ),
    "Bartoldson2024Adversarial_WRN-82-8": _swish(82, 8),
    "Bartoldson2024Adversarial_WRN-94-16": _swish(94, 16),
    "cifar100/Addepalli2022Efficient_RN18": _RESNET18,
    "cifar100/Rebuffi2021Fixing_R18_ddpm": _SWISH_18_HUNDRED,
    "cifar100/Rade2021Helper_R18_ddpm": _SWISH_18_HUNDRED,
    "cifar100/Addepalli2021Towards_PARN18": Published("preact-resnet18"),
    "cifar100/Rice2020Overfitting": Published("preact-resnet18", {}, _HUNDRED_FINE),
    "cifar100/Hendrycks2019Using": _wrn(28, 10, _TO_ONE),
    **dict.fromkeys(
        (
            "cifar100/Addepalli2021Towards_WRN34",
            "cifar100/Addepalli2022Efficient_WRN_34_10",
            "cifar100/Chen2021LTD_WRN34_10",
            "cifar100/Chen2024Data_WRN_34_10",
            "cifar100/Cui2020Learnable_34_10_LBGAT0",
            "cifar100/Cui2020Learnable_34_10_LBGAT6",
            "cifar100/Cui2020Learnable_34_10_LBGAT9_eps_8_255",
            "cifar100/Cui2023Decoupled_WRN-34-10",
            "cifar100/Cui2023Decoupled_WRN-34-10_autoaug",
            "cifar100/Jia2022LAS-AT_34_10",
            "cifar100/Sehwag2021Proxy",
            "cifar100/Sitawarin2020Improving",
        ),
        _wrn(34, 10),
    ),
    "cifar100/Chen2020Efficient": _wrn(34, 10, _HUNDRED_COARSE),
    "cifar100/Wu2020Adversarial": _wrn(34, 10, _HUNDRED_FINE),
    "cifar100/Cui2020Learnable_34_20_LBGAT6": _wrn(34, 20),
    "cifar100/Jia2022LAS-AT_34_20": _wrn(34, 20),
    **dict.fromkeys(
        (
            "cifar100/Cui2023Decoupled_WRN-28-10",
            "cifar100/Pang2022Robustness_WRN28_10",
            "cifar100/Rebuffi2021Fixing_28_10_cutmix_ddpm",
            "cifar100/Wang2023Better_WRN-28-10",
        ),
        _swish(28, 10, _HUNDRED),
    ),
    **dict.fromkeys(
        (
            "cifar100/Gowal2020Uncovering",
            "cifar100/Gowal2020Uncovering_extra",
            "cifar100/Pang2022Robustness_WRN70_16",
            "cifar100/Rebuffi2021Fixing_70_16_cutmix_ddpm",
            "cifar100/Wang2023Better_WRN-70-16",
        ),
        _swish(70, 16, _HUNDRED),
    ),
}
