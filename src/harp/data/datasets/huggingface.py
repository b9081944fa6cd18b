"""A data set of Hugging Face's `datasets` in a folder, as its `save_to_disk` writes it."""

import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harp.data.dataset import DataSet, Split, draw_test
from harp.data.datasets.base import UNKNOWN, Source, contents
from harp.data.formats.bounded import first_line
from harp.data.formats.images import Centre, decode_image, strict_warnings
from harp.errors import DataError, MissingExtra
from harp.system.memory import machine_memory
from harp.system.progress import Quiet

_PARTS = (("train", "training"), ("test", "testing", "val", "valid", "validation"))
_LABELS = ("label", "labels", "target", "class", "fine_label")
_CHUNK = 256  # images between two reports of the progress


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return one or (folder / "dataset_dict.json").is_file()


class HuggingFace(Source):
    """Images and labels of a data set on disk; the class names are those of its features."""

    def open(self, folder: Path, size: int | None, display: Quiet | None = None) -> DataSet:
        """Decode all images to `size`."""
        if size is None:
            raise DataError(f"{self.name}: no image size for {folder}, expected --size 64, or data.size in a recipe")
        parts = _parts(folder)
        image, label, names = _columns(folder, next(iter(parts.values())))
        count, memory = sum(map(len, parts.values())), machine_memory()
        if memory is not None and 3 * count * size * size > memory:
            wanted = f"{count:,} images at size {size} need {3e-9 * count * size * size:.1f} GB"
            raise DataError(f"{folder}: {wanted}, expected less than {memory / 1e9:.1f} GB")
        splits = {
            part: Split(
                _decoded(rows, image, size, f"{folder}: {part}", display or Quiet()), _labels(rows, label, folder)
            )
            for part, rows in parts.items()
        }
        train, drawn = splits["train"], "test" not in splits
        if drawn:
            held = draw_test(train.labels, str(folder))
            splits["test"], train = train.select(held.nonzero().flatten()), train.select((~held).nonzero().flatten())
        classes = names or tuple(map(str, range(1 + max(int(split.labels.max()) for split in splits.values()))))
        source = f"{folder}; {'test images drawn from all, ' * drawn}{UNKNOWN}"
        return DataSet(self.name, train, splits["test"], classes, source=source, drawn=drawn)

    def first_size(self, folder: Path, display: Quiet) -> tuple[int, int]:
        """Width and height of the first image."""
        rows = next(iter(_parts(folder).values()))
        image = _columns(folder, rows)[0]
        with strict_warnings():
            size = decode_image(_bytes(_cells(rows, image, 0, 1)[0], str(folder)), str(folder)).size
        return int(size[0]), int(size[1])


def _library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        message = 'this data set needs the library datasets: pip install "harp-prune[huggingface]"'
        raise MissingExtra(f"{message} ({first_line(error)})") from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The library hashes what it does with a data set, and warns of what it can't hash."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _parts(folder: Path) -> dict[str, Any]:
    """The training part, and the test part if there is one."""
    if not is_saved(folder):
        raise DataError(f"{folder}: no dataset_dict.json, expected what save_to_disk writes; {contents(folder)}")
    library = _library()
    try:
        with _without_warnings():
            loaded = library.load_from_disk(str(folder))
    except Exception as error:  # the library raises nearly anything on damaged files
        raise DataError(f"{folder}: can't be read ({first_line(error)}), expected what save_to_disk writes") from error
    if not isinstance(loaded, Mapping):
        return {"train": loaded}
    train, test = (next((name for name in names if name in loaded), None) for names in _PARTS)
    if train is None and test is None and len(loaded) == 1:
        train = next(iter(loaded))
    if train is None:
        raise DataError(f"{folder}: the parts {', '.join(loaded)}, expected train, and test or validation")
    return {"train": loaded[train]} | ({} if test is None else {"test": loaded[test]})


def _columns(folder: Path, rows: Any) -> tuple[str, str, tuple[str, ...]]:
    """The columns of the images and the labels, and the names of the classes."""
    library, features = _library(), rows.features
    image = next((name for name, kind in features.items() if isinstance(kind, library.Image)), None)
    named = [name for name, kind in features.items() if isinstance(kind, library.ClassLabel)]
    numbered = [name for name in _LABELS if str(getattr(features.get(name), "dtype", "")).startswith(("int", "uint"))]
    label = next(iter(sorted(named, key=lambda name: name not in _LABELS) or numbered), None)
    if image is None or label is None:
        shown = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in features.items())
        raise DataError(f"{folder}: columns {shown}, expected an Image and a ClassLabel")
    return image, label, tuple(features[label].names) if named else ()


def _cells(rows: Any, column: str, start: int = 0, count: int | None = None) -> list[Any]:
    """The values of a column as they are stored: images encoded, with their bytes or their path.

    They are read from the table itself: the library's own ways decode them, or hash each operation first.
    """
    values: list[Any] = rows.data.column(column).slice(start, count).to_pylist()
    return values


def _bytes(cell: Mapping[str, Any], where: str) -> bytes:
    data, path = cell.get("bytes"), cell.get("path")
    try:
        return bytes(data) if data is not None else Path(str(path)).read_bytes()
    except OSError as error:
        raise DataError(f"{where}: can't be read ({error.strerror}: {path}), expected an image") from error


def _decoded(rows: Any, image: str, size: int, where: str, display: Quiet) -> torch.Tensor:
    crop, images = Centre(size), torch.zeros(len(rows), 3, size, size, dtype=torch.uint8)
    with strict_warnings(), display.counting(f"decode {where}", len(rows)):
        for start in range(0, len(rows), _CHUNK):
            for row, cell in enumerate(_cells(rows, image, start, _CHUNK), start):
                images[row] = torch.from_numpy(crop(decode_image(_bytes(cell, f"{where} {row}"), f"{where} {row}")))
            display.count(min(start + _CHUNK, len(rows)), len(rows))
    return images


def _labels(rows: Any, label: str, folder: Path) -> torch.Tensor:
    values = np.array(_cells(rows, label), dtype=object)
    if any(value is None for value in values):
        raise DataError(f"{folder}: {label} has no value in some rows, expected a class for each image")
    return torch.from_numpy(values.astype(np.int64))
