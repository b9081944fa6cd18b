"""Streamed images: indexed like tensors, with the same batches as images in memory."""

import copy
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harp.data.batches import Augment, Batches, ResizedCrop
from harp.data.datasets.image_folder import whole_files
from harp.data.decodable import Corrupt
from harp.data.formats.byte_ranges import Place, read_place
from harp.data.formats.images import Centre
from harp.data.registry import DataSet, Split, holdout, load
from harp.data.streaming.images import Streamed
from harp.data.streaming.workers import PREFETCH, Decoder, Job, Loader, default_workers
from harp.errors import DataError, RecipeError
from support.pictures import damage, encoded, fill

pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def streamed(folder: Path) -> DataSet:
    return load("folder", folder, 8, stream=True)


@pytest.fixture(scope="module")
def memory(folder: Path) -> DataSet:
    return load("folder", folder, 8)


# --- in the place of a tensor


def test_streamed_images_are_indexed_like_a_tensor(streamed: DataSet, memory: DataSet) -> None:
    images, whole = streamed.train.images, memory.train.images
    assert isinstance(images, Streamed) and type(whole) is torch.Tensor
    assert (images.shape, images.dtype, images.ndim, len(images)) == (whole.shape, whole.dtype, 4, 30)
    assert images.device.type == "cpu" and not images.is_floating_point()
    mask = torch.arange(30) % 7 == 0
    for key in (0, -1, slice(3, 9), slice(None, None, 5), slice(0, 0), torch.tensor([4, 4, 1]), mask, [2, 3]):
        assert torch.equal(images[key], whole[key]), key
        assert type(images[key]) is torch.Tensor
    with pytest.raises(IndexError):
        images[30]
    with pytest.raises(DataError, match="by image alone"):
        images[:2, 0]
    for compute in (lambda: images + 1, lambda: images.float(), lambda: torch.cat([images, images])):
        with pytest.raises(DataError, match="take some of them by index first"):
            compute()
    assert "Streamed((30, 3, 8, 8)" in repr(images)
    assert copy.deepcopy(images) is images
    assert torch.equal(pickle.loads(pickle.dumps(images))[:3], whole[:3])


def test_selections_stay_in_their_files(streamed: DataSet, memory: DataSet) -> None:
    parts = holdout(streamed.train, 7, seed=1), holdout(memory.train, 7, seed=1)
    for lazy, held in zip(*parts, strict=True):
        assert isinstance(lazy.images, Streamed)
        again = lazy.select(torch.arange(len(lazy)).flip(0))
        assert isinstance(again.images, Streamed)
        assert torch.equal(again.images[:], held.images.flip(0))
        assert torch.equal(again.labels, held.labels.flip(0))


def test_decoding_with_threads_is_the_same(streamed: DataSet) -> None:
    before = torch.get_num_threads()
    alone = streamed.train.images[:]
    try:
        torch.set_num_threads(3)
        assert torch.equal(streamed.train.images[:], alone)
    finally:
        torch.set_num_threads(before)


def test_the_fingerprint_reads_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 6, 3)

    def fingerprint(**options: Any) -> str:
        return load("folder", tmp_path, options.pop("size", 8), stream=True, **options).fingerprint()

    first = tmp_path / "train/class0/000.jpg"
    monkeypatch.setattr("harp.data.streaming.images.decode", None)
    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    seen += [fingerprint(size=9), fingerprint(margin=1.25)]
    data = first.read_bytes()
    first.write_bytes(data + b"\0")
    seen.append(fingerprint())
    first.write_bytes(data)
    assert fingerprint() == seen[0]
    first.rename(first.with_name("renamed.jpg"))
    seen.append(fingerprint())
    assert len(set(seen)) == 5


def test_images_that_need_much_memory_are_streamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 4 * 38 * 3 * 8 * 8}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert type(load("folder", folder, 8).train.images) is torch.Tensor
    pages["SC_PHYS_PAGES"] -= 4
    assert isinstance(load("folder", folder, 8).train.images, Streamed)
    assert type(load("folder", folder, 8, stream=False).train.images) is torch.Tensor
    pages["SC_PHYS_PAGES"] //= 5
    with pytest.raises(DataError, match=r"38 images at size 8 need 0.0 GB, expected .* or stream: true"):
        load("folder", folder, 8, stream=False)


def test_only_files_can_be_streamed() -> None:
    for options in ({"stream": True}, {"margin": 1.1}):
        with pytest.raises(DataError, match=r"digits: its images are not files, expected imagenet, .*folder"):
            load("digits", **options)
    assert load("digits", stream=False).fingerprint() == load("digits").fingerprint()


# --- batches


AUGMENTS = {"none": None, "pad": Augment(2), "pad without mirror": Augment(1, False)}


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5),
    world=st.integers(1, 4),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
    start=st.integers(0, 4),
    augment=st.sampled_from(list(AUGMENTS)),
)
def test_streamed_batches_are_those_from_memory(
    streamed: DataSet, memory: DataSet, batch: int, world: int, seed: int, epoch: int, start: int, augment: str
) -> None:
    options: dict[str, Any] = {"seed": seed, "augment": AUGMENTS[augment]}
    lazy, held = Batches(streamed.train, batch * world, **options), Batches(memory.train, batch * world, **options)
    for rank in range(world):
        pairs = zip(lazy.shard(rank, world)(epoch, start), held.shard(rank, world)(epoch, start), strict=True)
        for (x, y), (u, v) in pairs:
            assert torch.equal(x, u) and torch.equal(y, v)


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(1, 4), world=st.integers(1, 4), epoch=st.integers(0, 5), start=st.integers(0, 6))
def test_resized_crops_depend_on_nothing_but_the_place_in_the_global_batch(
    streamed: DataSet, batch: int, world: int, epoch: int, start: int
) -> None:
    whole = Batches(streamed.train, 12, seed=4, augment=ResizedCrop())
    alone = list(whole(epoch))[start:]
    if 12 % world:
        with pytest.raises(RecipeError):
            whole.shard(0, world)
        return
    parts = [list(whole.shard(rank, world)(epoch, start)) for rank in range(world)]
    for index, (x, y) in enumerate(alone):
        count = len(y) - len(y) % world
        for rank in range(world):
            assert torch.equal(parts[rank][index][0], x[rank:count:world])
            assert torch.equal(parts[rank][index][1], y[rank:count:world])


@pytest.mark.parametrize("augment", [Augment(2), ResizedCrop()], ids=["pad", "resized"])
def test_batches_do_not_depend_on_the_number_of_workers(streamed: DataSet, augment: Any) -> None:
    state = torch.get_rng_state()
    expected = [list(Batches(streamed.train, 6, seed=2, augment=augment)(epoch)) for epoch in range(3)]
    for workers in (1, 2):
        for rank in range(2):
            batches = Batches(streamed.train, 6, seed=2, augment=augment, workers=workers).shard(rank, 2)
            stopped = batches(0)
            next(stopped)  # an epoch that is left in the middle
            for epoch, start in ((1, 0), (0, 3), (2, 4)):
                for (x, y), (u, v) in zip(batches(epoch, start), expected[epoch][start:], strict=True):
                    assert torch.equal(x, u[rank::2]) and torch.equal(y, v[rank::2])
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_prefetch_a_limited_number_of_jobs(folder: Path) -> None:
    taken = []

    def jobs() -> Any:
        for number in range(40):
            taken.append(number)
            yield Job([])

    loader = Loader(Decoder(Centre(8)), 2)
    for done, _ in enumerate(loader(jobs()), start=1):
        assert len(taken) <= done + 2 * PREFETCH
    assert done == 40


def test_images_of_a_dead_worker_are_decoded_in_the_training_process(
    streamed: DataSet, worker: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    expected = list(Batches(streamed.train, 2, seed=1)(0))
    batches = Batches(streamed.train, 2, seed=1, workers=1)
    received = []
    with caplog.at_level(logging.WARNING, "harp"):
        for number, pair in enumerate(batches(0)):
            received.append(pair)
            if number == 2:
                os.kill(worker(), signal.SIGKILL)
    assert len(received) == len(expected)
    assert all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(received, expected, strict=True))
    assert "a loading process died" in caplog.text
    assert len(list(batches(1))) == 15  # by new workers


def test_workers_ignore_signals_that_the_training_handles(streamed: DataSet, worker: Callable[[], int]) -> None:
    batches = Batches(streamed.train, 2, seed=1, workers=1)
    received = []
    for number, pair in enumerate(batches(0)):
        received.append(pair)
        if number == 1:
            for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
                os.kill(worker(), getattr(signal, name))
    assert len(received) == 15
    os.kill(worker(), 0)  # still there
    pid = worker()
    del batches
    wait_until_gone(str(pid))


def wait_until_gone(*pids: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"{left} are still there"
        time.sleep(0.02)


SCRIPT = """
import multiprocessing, sys, time
from harp.data.batches import Batches
from harp.data.registry import load

if __name__ == "__main__":
    batches = Batches(load("folder", sys.argv[1], 8, stream=True).train, 2, workers=2)
    received = batches(0)
    next(received)
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_training_that_was_killed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        workers = training.stdout.readline().split()
        assert len(workers) == 2 and all(Path(f"/proc/{pid}").exists() for pid in workers)
        training.kill()
    wait_until_gone(*workers)


@pytest.fixture
def worker() -> Callable[[], int]:
    """The process id of the only worker that the test has started."""
    gc.collect()  # ends the workers of earlier tests
    earlier = set(multiprocessing.active_children())

    def pid() -> int:
        (process,) = set(multiprocessing.active_children()) - earlier
        assert process.pid is not None
        return process.pid

    return pid


def test_invalid_arguments_are_refused(streamed: DataSet, memory: DataSet) -> None:
    with pytest.raises(RecipeError, match="workers -1"):
        Batches(streamed.train, 2, workers=-1)
    with pytest.raises(RecipeError, match="need streamed images"):
        Batches(memory.train, 2, augment=ResizedCrop())
    assert default_workers(10_000) == 0 <= default_workers(1) <= 8


# --- damaged images in training


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("augment", [Augment(2), ResizedCrop()], ids=["pad", "resized"])
def test_an_undecodable_image_is_replaced_by_the_next_readable_one(
    tmp_path: Path, workers: int, augment: Any, caplog: pytest.LogCaptureFixture
) -> None:
    names = damage(fill(tmp_path))
    split = load("folder", tmp_path, 8, stream=True).train
    order = [Path(place.name).relative_to(tmp_path).as_posix() for place in split.images.places(torch.arange(30))]
    bad = {order.index(name) for name in names}
    instead = [next(i for i in [*range(k, 30), *range(30)] if i not in bad) for k in range(30)]
    mended = split.select(torch.tensor(instead))
    corrupt = Corrupt(30, path=tmp_path / "run/corrupt.txt")
    batches = Batches(split, 8, seed=3, augment=augment, workers=workers, corrupt=corrupt)
    for epoch in (0, 1):
        pairs = zip(batches(epoch), Batches(mended, 8, seed=3, augment=augment)(epoch), strict=True)
        for (x, y), (u, v) in pairs:
            assert torch.equal(x, u) and torch.equal(y, v)
    lines = (tmp_path / "run/corrupt.txt").read_text().splitlines()
    assert sorted(line.split(": can't")[0] for line in lines) == sorted(str(tmp_path / name) for name in names)
    assert len([record for record in caplog.records if "can't be decoded" in record.message]) == 5
    again = Corrupt(30, path=tmp_path / "run/corrupt.txt")
    assert again.reasons == lines
    caplog.clear()
    Corrupt(30, path=tmp_path / "run/corrupt.txt").add("another process found it")
    for _ in range(2):
        again.catch_up()
    assert [record.message.partition(";")[0] for record in caplog.records] == 2 * ["another process found it"]


def test_undecodable_images_are_reported_if_the_file_can_not_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder can be made below this")
    corrupt = Corrupt(30, 2, path=tmp_path / "file/run/corrupt.txt")
    corrupt.add("1.png: can't be decoded")
    corrupt.add("2.png: can't be decoded")
    assert caplog.text.count("can't write") == 1 and caplog.text.count("takes its place") == 2
    with pytest.raises(DataError, match="3 of 30 images"):
        corrupt.add("3.png: can't be decoded")


def test_too_many_damaged_images_end_the_training(tmp_path: Path) -> None:
    damage(fill(tmp_path))
    split = load("folder", tmp_path, 8, stream=True).train
    for share, limit in ((3, 3), (0, 0)):
        batches = Batches(split, 8, corrupt=Corrupt(30, share))
        message = rf"{limit + 1} of 30 images can't be decoded, expected at most {limit} \(data.corrupt\); the first: /"
        with pytest.raises(DataError, match=message):
            list(batches(0))
    assert Corrupt(30).limit == 10
    assert Corrupt(1_281_167).limit == 1281
    position = next(i for i in range(30) if "004" in split.images.places(torch.tensor([i]))[0].name)
    nothing = split.select([position])
    with pytest.raises(DataError, match="none of 1 images can be decoded"):
        list(Batches(nothing, 1)(0))


def test_a_missing_image_file_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, 4, 3)
    images = load("folder", tmp_path, 8, stream=True).train.images
    Path(images.places(torch.tensor([1]))[0].path).unlink()
    with pytest.raises(DataError, match=r"can't be read \(No such file"):
        images[:2]
    assert len(images[2:]) == 2


# --- memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("workers", [0, 1])
def test_memory_is_flat(tmp_path: Path, worker: Callable[[], int], workers: int) -> None:
    """Decoding many images does not increase the memory, here and in the worker."""
    path = tmp_path / "x.jpg"
    path.write_bytes(encoded(1, 160, 120))
    split = Split(_repeated(path, 512), torch.zeros(512, dtype=torch.int64))
    batches = Batches(split, 64, augment=ResizedCrop(), workers=workers)
    marks = []
    for epoch in range(12):
        for _ in batches(epoch):
            pass
        marks.append(_resident(worker() if workers else os.getpid()))
    # The images of eight epochs would take twice this if they stayed as bytes, and eight times this as floats. Minima,
    # because the C library may keep a few batches for a while.
    assert min(marks[8:]) - min(marks[:4]) < 4 * 512 * 3 * 96 * 96, marks


def _repeated(path: Path, count: int) -> Streamed:
    files = [(path.name, path.stat().st_size)] * count
    return Streamed(whole_files(path.parent, files, np.zeros(count, np.int64)), Centre(96))


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_read_place_reads_the_byte_range(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert read_place(Place("a", str(path), 2, 3)) == b"234"
    assert read_place(Place("a", str(path))) == b"0123456789"
    with pytest.raises(DataError, match="2 bytes, expected 5: the archive is truncated"):
        read_place(Place("a", str(path), 8, 5))
