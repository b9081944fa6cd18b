"""Masks: exact counts whatever the scores, one bit a weight on disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from harp.errors import CheckpointError, ModelError
from harp.pruning import masks
from support import cases

scores = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=1, max_dims=4, max_side=6),
    elements=st.sampled_from([0.0, -0.0, 1.0, 0.5, 2.0, 1e-30, 3e38, float("inf")]),  # ties on purpose
)


@settings(max_examples=150, deadline=None)
@given(values=scores, data=st.data())
def test_top_k_keeps_exactly_k_of_the_largest_and_of_equals_the_first(values: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, values.size))
    mask = masks.top_k(torch.from_numpy(values), k)
    order = sorted(range(values.size), key=lambda i: (-values.flat[i], i))
    assert mask.flatten().nonzero().flatten().tolist() == sorted(order[:k])
    assert mask.shape == values.shape


@settings(max_examples=50, deadline=None)
@given(values=scores, data=st.data())
def test_masks_nest_as_k_shrinks(values: np.ndarray, data: st.DataObject) -> None:
    large = data.draw(st.integers(0, values.size))
    small = data.draw(st.integers(0, large))
    tensor = torch.from_numpy(values)
    assert not (masks.top_k(tensor, small) & ~masks.top_k(tensor, large)).any()


def test_other_layouts_and_types_give_the_same_mask() -> None:
    values = torch.rand(4, 3, 5, 5).to(torch.bfloat16)
    expected = masks.top_k(values.float(), 17)
    assert torch.equal(masks.top_k(values, 17), expected)
    assert torch.equal(masks.top_k(values.to(memory_format=torch.channels_last), 17), expected)


def test_nan_scores_are_refused() -> None:
    with pytest.raises(ModelError, match="NaN"):
        masks.top_k(torch.tensor([1.0, float("nan"), 2.0]), 2)


def test_more_entries_than_there_are_can_not_be_kept_or_drawn() -> None:
    with pytest.raises(ValueError, match="can't keep 4 of 3"):
        masks.top_k(torch.ones(3), 4)
    with pytest.raises(ValueError, match="can't draw 3 of 2"):
        masks.at_random(torch.tensor([True, False, True]), 3, torch.Generator())


@settings(max_examples=30, deadline=None)
@given(values=scores, k=st.integers(0, 1000))
def test_saved_masks_come_back(tmp_path_factory: pytest.TempPathFactory, values: np.ndarray, k: int) -> None:
    path = tmp_path_factory.mktemp("masks") / "masks.safetensors"
    before = {
        "layer.weight": masks.top_k(torch.from_numpy(values), min(k, values.size)),
        "b": torch.ones(3, 1, dtype=bool),
    }
    masks.save(path, before)
    after = masks.load(path)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_mask_takes_one_bit_a_weight(tmp_path: Path) -> None:
    masks.save(tmp_path / "m.safetensors", {"w": torch.rand(1000, 800) > 0.5})
    assert (tmp_path / "m.safetensors").stat().st_size < 100_000 + 500


def test_other_files_are_no_masks(tmp_path: Path) -> None:
    from harp.system.tensors import save_tensors

    save_tensors(tmp_path / "other.safetensors", {"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match="no file of masks"):
        masks.load(tmp_path / "other.safetensors")


def test_apply_zeroes_and_refuses_masks_of_another_model() -> None:
    model = cases.build("conv")
    mask = torch.rand(8, 3, 3, 3) > 0.5
    masks.apply(model, {"features.0.weight": mask})
    assert torch.equal(model.features[0].weight != 0, mask)
    with pytest.raises(ModelError, match="another model"):
        masks.apply(model, {"features.9.weight": mask})
    assert masks.kept({"a": mask}) == int(mask.sum())
    assert masks.density({"a": mask}) == pytest.approx(float(mask.float().mean()))
