"""Classes that are named by their synset in WordNet, such as n01440764, and the words for them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path


def read_words(path: Path) -> dict[str, str]:
    """The words of synsets from a file whose lines are a synset, a tab or blank, and words."""
    if not path.is_file():
        return {}
    lines = (line.strip().split(None, 1) for line in path.read_text("utf-8", "replace").splitlines())
    return {fields[0]: fields[1] for fields in lines if len(fields) == 2}


def class_names(synsets: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """The first word for each synset; where two have the same one (crane, a bird and a machine) with the synset."""
    first = [words.get(synset, synset).split(",")[0].strip() or synset for synset in synsets]
    counts = Counter(first)
    pairs = zip(first, synsets, strict=True)
    return tuple(name if counts[name] == 1 else f"{name} ({synset})" for name, synset in pairs)
