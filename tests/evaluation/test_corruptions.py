"""Common corruptions: within the box, repeatable, stronger with severity, on images of any size."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.data import registry
from harp.errors import DataError, RecipeError
from harp.evaluation import corruptions
from harp.evaluation import score as evaluate
from harp.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt, measure
from support import cases


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pictures() -> dict[str, Tensor]:
    grey = registry.load("fashion").test.images[:24].float() / 255
    small = registry.load("digits").test.images[:24].float() / 255
    colour = torch.stack([grey[:8, 0], grey[8:16, 0], grey[16:24, 0]], dim=1)
    return {"fashion": grey, "digits": small, "colour": colour}


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("which", ["fashion", "digits", "colour"])
def test_severity_is_monotone(pictures: dict[str, Tensor], kind: str, which: str) -> None:
    x = pictures[which]
    distances = [float((corrupt(x, kind, severity, generator()) - x).square().mean().sqrt()) for severity in SEVERITIES]
    assert distances[0] > 0.005
    assert all(after > before for before, after in pairwise(distances)), distances
    assert distances[-1] < 0.4


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(CORRUPTIONS)), severity=st.sampled_from(SEVERITIES), n=st.integers(1, 3),
    channels=st.sampled_from([1, 3]), height=st.integers(1, 70), width=st.integers(1, 70), seed=st.integers(0, 2**60),
)  # fmt: skip
def test_any_size_stays_in_the_box_and_follows_the_generator(
    kind: str, severity: int, n: int, channels: int, height: int, width: int, seed: int
) -> None:
    x = torch.rand(n, channels, height, width, generator=generator(seed))
    before = x.clone()
    found = corrupt(x, kind, severity, generator(seed))
    assert found.shape == x.shape and found.dtype == x.dtype
    assert bool(found.isfinite().all()) and float(found.min()) >= 0 and float(found.max()) <= 1
    assert torch.equal(found, corrupt(x, kind, severity, generator(seed)))
    assert torch.equal(x, before)


def test_a_uniform_picture_is_not_changed_by_what_only_moves_light() -> None:
    x = torch.full((2, 3, 20, 17), 0.25)
    for kind in ("defocus_blur", "motion_blur", "zoom_blur", "contrast", "elastic", "pixelate"):
        assert torch.allclose(corrupt(x, kind, 5, generator()), x, atol=1e-5), kind


def test_noise_has_the_moments_it_should_have() -> None:
    x = torch.full((4, 3, 64, 64), 0.5)
    noise = corrupt(x, "gaussian_noise", 3, generator()) - x
    assert abs(float(noise.std()) - 0.08) < 0.001 and abs(float(noise.mean())) < 0.002
    shot = corrupt(x, "shot_noise", 5, generator())
    assert abs(float(shot.std()) - (0.5 / 50) ** 0.5) < 0.002 and abs(float(shot.mean()) - 0.5) < 0.002
    impulses = corrupt(x, "impulse_noise", 5, generator())
    assert set(impulses.unique().tolist()) == {0.0, 0.5, 1.0}
    assert abs(float((impulses != 0.5).float().mean()) - 0.07) < 0.005


def test_blur_by_definition() -> None:
    x = torch.zeros(1, 1, 21, 21)
    x[..., 10, 10] = 1
    spread = corrupt(x, "defocus_blur", 5, generator())
    assert float(spread.sum()) == pytest.approx(1) and float(spread.max()) < 0.1
    assert torch.allclose(spread, spread.flip(2), atol=1e-6) and torch.allclose(
        spread, spread.transpose(2, 3), atol=1e-6
    )
    line = corrupt(x, "motion_blur", 5, generator())
    assert float(line.sum()) == pytest.approx(1, abs=1e-4)
    places = line[0, 0].nonzero().float()
    assert torch.linalg.matrix_norm(places - places.mean(0), 2) > 3 * torch.linalg.svdvals(places - places.mean(0))[1]


def test_zoom_goes_inwards_and_keeps_the_middle() -> None:
    x = torch.zeros(1, 1, 33, 33)
    x[..., 16, 16] = 1
    assert float(corrupt(x, "zoom_blur", 5, generator()).argmax()) == 16 * 33 + 16
    edge = torch.zeros(1, 1, 33, 33)
    edge[..., :4] = 1  # a stripe at the border wanders out of the picture
    assert float(corrupt(edge, "zoom_blur", 5, generator()).mean()) < float(edge.mean())


def test_jpeg_of_a_picture_that_fits_its_quanta_is_exact() -> None:
    x = torch.full((1, 1, 8, 8), 8 * 16 / 255 / 8)  # one step of the constant coefficient's quantum at severity 2
    assert torch.allclose(corrupt(x, "jpeg", 2, generator()), x, atol=1e-6)


def test_pixels_that_divide_evenly_are_plain_means() -> None:
    x = torch.rand(2, 3, 8, 12, generator=generator())
    blocks = nn.functional.avg_pool2d(x, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.allclose(corrupt(x, "pixelate", 4, generator()), blocks, atol=1e-6)


def test_images_of_a_batch_have_noise_of_their_own() -> None:
    x = torch.full((2, 1, 16, 16), 0.5)
    x[:, :, 4:12, 4:12] = 0.9
    for kind in ("gaussian_noise", "shot_noise", "impulse_noise", "motion_blur", "fog", "elastic"):
        first, second = corrupt(x, kind, 4, generator())
        assert not torch.equal(first, second), kind


class Mean(nn.Module):
    """Tells bright pictures from dark ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[0.0], [1.0]]))
            self.linear.bias.copy_(torch.tensor([0.5, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((1, 2, 3))[:, None])


def test_measure_gives_a_row_each_and_their_mean() -> None:
    x = torch.full((40, 1, 8, 8), 0.43)
    y = torch.zeros(40, dtype=torch.long)
    seen: list[tuple[int, int]] = []
    found = measure(
        Mean(), x, y, kinds=["brightness", "contrast"], seed=3, batch=16, progress=lambda *at: seen.append(at)
    )
    values = {(row["corruption"], row["severity"]): row["value"] for row in found["rows"]}
    assert values == {("contrast", s): 1.0 for s in SEVERITIES} | {("brightness", s): float(s == 1) for s in SEVERITIES}
    assert found["mean"] == pytest.approx(0.6)
    assert found["rows"][0] == {
        "corruption": "brightness", "severity": 1, "value": 1.0, "n": 40,
        "low": found["rows"][0]["low"], "high": 1.0,
    }  # fmt: skip
    assert 0.9 < found["rows"][0]["low"] < 1
    assert seen[0] == (16, 400) and seen[-1] == (400, 400) and seen == sorted(seen)


def test_measure_is_repeatable_and_leaves_the_model_alone() -> None:
    model = cases.build("conv").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = cases.batch(24)
    options = {"kinds": ["gaussian_noise", "fog"], "severities": (1, 5), "batch": 10}
    first = measure(model, x, y, seed=1, **options)  # type: ignore[arg-type]
    torch.rand(3)
    assert measure(model, x, y, seed=1, **options) == first  # type: ignore[arg-type]
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    score = evaluate.accuracy(model, x, y, attack=corruptions.Corruption("fog", 5), batch=10, seed=1)
    assert score.accuracy == first["rows"][-1]["value"] and score.name == "fog-5"


def test_all_kinds_on_bytes() -> None:
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=generator())
    found = measure(cases.build("conv"), images, torch.zeros(6, dtype=torch.long), severities=(5,), seed=0, batch=6)
    assert [row["corruption"] for row in found["rows"]] == list(CORRUPTIONS)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: corrupt(torch.zeros(1, 1, 4, 4), "rain", 1, generator()), "no corruption is called 'rain'"),
        (lambda: corrupt(torch.zeros(1, 1, 4, 4), "fog", 6, generator()), "severity must be"),
        (lambda: measure(Mean(), torch.zeros(1, 1, 4, 4), torch.zeros(1).long(), severities=()), "no severities"),
    ],
)
def test_wrong_wishes(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        wrong()


def test_images_outside_the_box() -> None:
    with pytest.raises(DataError, match="normalisation belongs into the model"):
        measure(Mean(), torch.full((2, 1, 4, 4), 2.0), torch.zeros(2).long(), kinds=["fog"])
