"""What reading and decoding streamed images costs: the pipeline alone, without a network.

Images of 64x64 pixels (Tiny-ImageNet where it is given, else made up) are padded, cropped and mirrored; pictures of
500x375 pixels, made up, are cropped at random and resized to 224. Both come from a folder and from shards, decoded in
the process itself and by worker processes. Files are in the page cache: a slow disk is not what is measured here.

The variants take turns; medians of the wall clock count, as workers are other processes. `ahead` is the most memory
that worker processes may hold decoded, workers x 2 x batch; `resident` is the memory that this process and its workers
have at the end, beyond what it had before.
"""

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.terminal import Parser, positive, progress, say
from benchmarks.timing import cpu_name, interleaved, load

from harp.data import registry
from harp.data.batches import Augment, Batches, ResizedCrop
from harp.data.formats.images import pillow
from harp.data.streaming.workers import PREFETCH
from harp.data.webdataset import write_shards
from harp.errors import HarpError

SMALL, LARGE = "64", "224"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and the JSON object."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(options, Path(folder))
    except HarpError as error:
        print(f"loading.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Images a second of every variant."""
    rows, before = [], _resident()
    for size in options.sizes:
        variants = dict(_variants(options, folder, size))
        for name, batches in variants.items():
            say(f"warming up {name}")
            _epoch(batches)
        calls = {name: partial(_epoch, batches) for name, batches in variants.items()}
        times = interleaved(calls, options.repeats, progress(options.repeats))
        for name, batches in variants.items():
            images = len(batches) * batches.batch
            bytes_ahead = batches.workers * PREFETCH * batches.batch * 3 * int(size) ** 2
            rows.append(
                {
                    "way": name,
                    "images_per_second": round(images / times[name].median("wall"), 1),
                    "spread": round(times[name].spread("wall"), 2),
                    "ahead_mb": round(bytes_ahead / 1e6, 1),
                }
            )
        resident = _resident() - before
        variants.clear()
        calls.clear()
        say(f"size {size}: {resident / 1e6:.0f} MB more in this process and its workers")
        rows[-1]["resident_mb"] = round(resident / 1e6, 1)
    for row in rows:
        print(f"{row['way']:<22} {row['images_per_second']:>9,.0f} images/s   ahead {row['ahead_mb']:>7.1f} MB")
    facts = {"batch": options.batch, "images": options.images, "repeats": options.repeats}
    return {**facts, "rows": rows, "torch": torch.__version__, "cpu": cpu_name(), "load": load()}


def _variants(options: argparse.Namespace, folder: Path, size: str) -> Iterator[tuple[str, Batches]]:
    pictures = folder / size
    if size == SMALL and options.data_dir is not None:
        source = registry.load("tiny-imagenet", options.data_dir, stream=True)
        _copy(source, pictures, options.images)
    else:
        _paint(pictures, options.images, *((64, 64) if size == SMALL else (500, 375)))
    write_shards(pictures, folder / f"{size}-shards", count=256)
    augment = Augment(4) if size == SMALL else ResizedCrop()
    for name, where in (("folder", pictures), ("shards", folder / f"{size}-shards")):
        split = registry.load(name, where, int(size), stream=True).train
        for workers in options.workers:
            batches = Batches(split, min(options.batch, len(split)), augment=augment, workers=workers)
            yield f"{size} {name}, {workers} workers", batches


def _epoch(batches: Batches) -> None:
    for _ in batches(0):
        pass


def _copy(source: registry.DataSet, folder: Path, count: int) -> None:
    """Some images of a data set, of all classes."""
    images: Any = source.train.images
    chosen = torch.linspace(0, len(images) - 1, count).long()
    for number, place in enumerate(images.places(chosen)):
        _put(folder, number, Path(place.path).read_bytes())


def _paint(folder: Path, count: int, width: int, height: int) -> None:
    """Photographs that never were: smooth noise with some grain, which JPEG codes as large as photographs."""
    image = pillow()
    for number in range(count):
        rng = np.random.default_rng(number)
        smooth = image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height), 3)
        grain = rng.normal(0, 12, (height, width, 3))
        buffer = io.BytesIO()
        pixels = (np.asarray(smooth) + grain).clip(0, 255).astype(np.uint8)
        image.fromarray(pixels).save(buffer, "JPEG", quality=85)
        _put(folder, number, buffer.getvalue())


def _put(folder: Path, number: int, jpeg: bytes) -> None:
    for part in ("train", "test") if number < 10 else ("train",):
        path = folder / part / f"class{number % 10}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg)


def _resident() -> int:
    """Bytes that this process and all below it have, shared pages counted in part."""
    total = 0
    for pid in _family(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _family(pid: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        children = []
    return [pid, *(process for child in children for process in _family(child))]


def _parser() -> Parser:
    parser = Parser(prog="loading.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=positive, default=1024, help="images of each kind")
    parser.add_argument("--batch", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--workers", type=_count, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sizes", nargs="+", choices=[SMALL, LARGE], default=[SMALL, LARGE])
    parser.add_argument("--data-dir", type=Path, help="folder with Tiny-ImageNet, for the images of 64 pixels")
    return parser


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
