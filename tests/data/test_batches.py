"""The batches of an epoch: complete, repeatable, resumable, and the same however many processes share them."""

import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harp.data.batches import Augment, Batches
from harp.data.registry import Split
from harp.errors import DataError, RecipeError
from support.splits import numbered, numbers, quick

# --- augmentation


def slow_augment(images: Tensor, moves: Tensor, pad: int, flip: bool) -> Tensor:
    """One image at a time, one pixel at a time."""
    result = torch.zeros_like(images)
    _, channels, height, width = images.shape
    for i, (down, right, mirror) in enumerate(moves.tolist()):
        for channel in range(channels):
            for row in range(height):
                for column in range(width):
                    y, x = row + down - pad, (width - 1 - column if flip and mirror else column) + right - pad
                    if 0 <= y < height and 0 <= x < width:
                        result[i, channel, row, column] = images[i, channel, y, x]
    return result


@quick
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    pad=st.integers(0, 4),
    flip=st.booleans(),
    dtype=st.sampled_from([torch.uint8, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_augment_equals_a_slow_reference(shape: Any, pad: int, flip: bool, dtype: torch.dtype, seed: int) -> None:
    images = torch.randint(1, 256, shape).to(dtype)
    augment = Augment(pad, flip)
    moves = augment.draw(shape[0], torch.Generator().manual_seed(seed))
    found = augment(images, torch.Generator().manual_seed(seed))
    assert found.dtype == dtype
    assert torch.equal(found, slow_augment(images, moves, pad, flip))


def test_augment_draws_evenly() -> None:
    moves = Augment(pad=2).draw(20_000, torch.Generator().manual_seed(0))
    for axis, values in ((0, 5), (1, 5), (2, 2)):
        shares = moves[:, axis].bincount() / 20_000
        assert len(shares) == values
        assert (shares - 1 / values).abs().max() < 0.02
    with pytest.raises(RecipeError, match="pad -1"):
        Augment(pad=-1)


# --- batches

sizes = {
    "count": st.integers(1, 70),
    "batch": st.integers(1, 24),
    "seed": st.integers(0, 5),
    "epoch": st.integers(0, 9),
}


@quick
@given(**sizes, shuffle=st.booleans())
def test_every_image_once_an_epoch(count: int, batch: int, seed: int, epoch: int, shuffle: bool) -> None:
    batches = Batches(numbered(count), batch, seed=seed, shuffle=shuffle)
    seen = list(batches(epoch))
    assert len(seen) == len(batches) == -(-count // batch)
    found = [number for x, _ in seen for number in numbers(x)]
    assert sorted(found) == list(range(count))
    assert shuffle or found == list(range(count))
    for x, y in seen:
        assert x.dtype == torch.float32
        assert y.tolist() == [number % 3 for number in numbers(x)]


@quick
@given(**sizes, start=st.integers(0, 80))
def test_start_skips_batches_and_batches_are_deterministic(
    count: int, batch: int, seed: int, epoch: int, start: int
) -> None:
    def batches() -> Batches:
        return Batches(numbered(count, side=4), batch, seed=seed, augment=Augment(pad=2))

    whole, resumed = list(batches()(epoch))[start:], list(batches()(epoch, start))
    assert len(whole) == len(resumed)
    for (x, y), (other_x, other_y) in zip(whole, resumed, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


@quick
@given(count=st.integers(4, 70), share=st.integers(1, 6), world=st.integers(1, 4), epoch=st.integers(0, 3))
def test_the_parts_of_all_processes_make_up_the_batch(count: int, share: int, world: int, epoch: int) -> None:
    whole = Batches(numbered(count, side=4), share * world, seed=1, augment=Augment(pad=2))
    parts = [list(whole.shard(rank, world)(epoch)) for rank in range(world)]
    assert {len(part) for part in parts} == {len(whole.shard(0, world))}
    for (x, y), *pieces in zip(whole(epoch), *parts, strict=False):
        trimmed = len(y) - len(y) % world
        assert {len(labels) for _, labels in pieces} == {trimmed // world}
        assert torch.equal(torch.stack([images for images, _ in pieces], 1).flatten(0, 1), x[:trimmed])
        assert torch.equal(torch.stack([labels for _, labels in pieces], 1).flatten(), y[:trimmed])
    assert len(whole) - len(parts[0]) <= (0 < count % (share * world) < world)


def test_batches_depend_on_seed_and_epoch() -> None:
    split = numbered(50)
    orders = {
        tuple(number for x, _ in Batches(split, 10, seed=seed)(epoch) for number in numbers(x))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_batches_are_the_same_in_every_release() -> None:
    """A stopped run continues with a newer release: these numbers must not change."""
    batches = Batches(numbered(8, side=3), 8, seed=3, augment=Augment(pad=1))
    order = [number for x, _ in Batches(numbered(8), 8, seed=3)(2) for number in numbers(x)]
    x, y = next(batches(2))
    digest = hashlib.sha256((x * 255).round().byte().numpy().tobytes()).hexdigest()[:16]
    assert (order, y.tolist(), digest) == ([1, 4, 0, 2, 3, 5, 6, 7], [1, 1, 0, 2, 0, 2, 0, 1], "f6be3073b4a688f7")


def test_batches_do_not_alter_the_data() -> None:
    split = Split(torch.rand(6, 1, 4, 4), torch.arange(6))
    before = split.images.clone()
    for x, _ in Batches(split, 2, augment=Augment(pad=1))(0):
        x.zero_()
    assert torch.equal(split.images, before)


def test_batches_wrong() -> None:
    split = numbered(10)
    with pytest.raises(RecipeError, match="batch 0 for 1 processes"):
        Batches(split, 0)
    with pytest.raises(RecipeError, match="batch 8 for 3 processes, expected a positive multiple of 3"):
        Batches(split, 8).shard(0, 3)
    with pytest.raises(RecipeError, match="rank 2 of 2 processes, expected 0 to 1"):
        Batches(split, 8).shard(2, 2)
    with pytest.raises(DataError, match="1 images for 2 processes"):
        Batches(split.select([0]), 8).shard(0, 2)
