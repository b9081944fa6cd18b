"""The development kit of ImageNet 2012: which synset the validation images' numbers mean, and its words."""

from dataclasses import dataclass
from pathlib import Path

from harp.data import formats
from harp.data.formats import File
from harp.errors import DataError

_FOLDER = "ILSVRC2012_devkit_t12"
_META, _TRUTH = "data/meta.mat", "data/ILSVRC2012_validation_ground_truth.txt"


@dataclass(frozen=True)
class Devkit:
    """The synset of each validation image, in the order of their numbers, and the words for all synsets."""

    synsets: list[str]
    words: dict[str, str]


def find_devkit(place: Path) -> Devkit | None:
    """Read the kit from its folder or its archive, if one is there."""
    folder, archive = place / _FOLDER, place / f"{_FOLDER}.tar.gz"
    if folder.is_dir():
        return _devkit(folder / _META, folder / _TRUTH)
    if archive.is_file():
        members = formats.read_archive(archive, [f"{_FOLDER}/{_META}", f"{_FOLDER}/{_TRUTH}"])
        return _devkit(members[f"{_FOLDER}/{_META}"], members[f"{_FOLDER}/{_TRUTH}"])
    return None


def _devkit(meta: File, truth: File) -> Devkit:
    synset, words = {}, {}
    for record in formats.read_mat5_records(meta, "synsets"):
        number, name, text = (record.get(key) for key in ("ILSVRC2012_ID", "WNID", "words"))
        if isinstance(number, float) and isinstance(name, str):
            synset[int(number)] = name
            words[name] = str(text or name)
    name, data = formats.read_file(truth, "the ground truth of the validation images")
    lines = data.decode("ascii", "replace").split()
    for position, line in enumerate(lines):
        if not line.isdigit() or int(line) not in synset:
            raise DataError(f"{name}: {line[:20]!r} in line {position + 1}, expected a class of meta.mat")
    return Devkit([synset[int(line)] for line in lines], words)
