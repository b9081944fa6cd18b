"""Models with trained weights, by one name: `robustbench:NAME:FILE` is short for a model, its normalisation, a file."""

import difflib
from pathlib import Path
from typing import Any

from harp.errors import ModelError
from harp.models.robustbench import PUBLISHED

ROBUSTBENCH = "robustbench:"


def written_out(spec: str) -> dict[str, Any] | None:
    """The keys of a recipe's model that a name is short for: name, options, normalize, weights; None: it is not."""
    if not spec.startswith(ROBUSTBENCH):
        return None
    name, colon, file = spec.removeprefix(ROBUSTBENCH).partition(":")
    if name not in PUBLISHED:
        close = difflib.get_close_matches(name, list(PUBLISHED), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "docs/models.md lists the names"
        raise ModelError(f"RobustBench's {name!r} is not known here: {hint}")
    if not colon or not file:
        raise ModelError(f"{spec} names no checkpoint: write {ROBUSTBENCH}{name}:FILE, downloaded by you")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ModelError(f"there is no file {file}, which {ROBUSTBENCH}{name} should be loaded from")
    published = PUBLISHED[name]
    normalize = {} if published.normalize is None else {"normalize": published.normalize}
    return {"name": published.model, **published.options, **normalize, "weights": str(path)}
