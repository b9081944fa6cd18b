"""Groups of options in `--help`, and the order of options, the same for all commands; and the page of each command."""

from typing import Any

GROUPS = {
    "Data": ("data", "data_dir", "size", "normalize", "images", "count"),
    "Network": ("weights", "classes", "shape", "twin"),
    "Pruning": (
        "methods",
        "method",
        "strategy",
        "keep",
        "channels",
        "budget",
        "multiple",
        "include",
        "ignore",
        "as_published",
    ),
    "Evaluation": (
        "attack",
        "examples",
        "full",
        "curve",
        "distances",
        "corruptions",
        "check",
        "checks",
        "store",
        "small",
        "cost",
        "bundle",
        "steps",
        "threads",
        "repeats",
        "intensity",
    ),
    "Training": (
        "objective",
        "epsilon",
        "norm",
        "pretrain",
        "prune_epochs",
        "finetune",
        "batch",
        "seeds",
        "seed",
        "protocol",
        "rank_by",
        "changes",
    ),
    "Machine": ("devices", "accelerator", "nodes", "node_rank", "main_address", "workers", "jobs"),
    "Cluster": ("launcher", "sbatch", "dry_run", "wait"),
    "Saving and stopping": ("max_minutes", "minutes", "keep_states"),
    "Submission": ("name", "key", "title", "authors", "venue", "link", "private", "license"),
    "Output": ("out", "to", "values", "dense", "as_json"),
}
"""The options of each group by their names in Python, in the order in which `--help` shows them."""

# Where what the group is named for is something else.
_EVALUATED = ("evaluate", "reproduce")
_EVALUATION = ("epsilon", "norm", "batch", "seeds", "seed")

PAGES = {
    "demo": "README.md",
    "run": "docs/reference/recipes.md",
    "prune": "docs/reference/methods.md",
    "compare": "docs/how-to/compare.md",
    "reproduce": "docs/evidence/reproductions.md",
    "estimate": "docs/how-to/estimate.md",
    "evaluate": "docs/how-to/evaluation.md",
    "report": "docs/how-to/evaluation.md",
    "slim": "docs/how-to/channels.md",
    "export": "docs/how-to/export.md",
    "push": "docs/how-to/sharing.md",
    "bench": "docs/explanation/engine.md",
    "shard": "docs/how-to/data.md",
    "list": "docs/reference/recipes.md",
    "plan": "docs/reference/methods.md",
    "doctor": "docs/how-to/models.md",
    "submit": "docs/how-to/submit.md",
}
"""The page of the documentation that says more about a command."""


def arrange(command: Any, words: tuple[str, ...] = ()) -> None:
    """Put the options of a command, or of all commands of a group, into their groups, in one order."""
    for name, inner in getattr(command, "commands", {}).items():
        arrange(inner, (*words, name))
    if not words:
        return
    places = {option: place for place, option in enumerate(name for names in GROUPS.values() for name in names)}
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name in places:
            parameter.rich_help_panel = _group(parameter.name, words[0])
    command.params.sort(key=lambda p: (p.param_type_name == "option", places.get(p.name, -1) if _is_option(p) else -1))
    command.epilog = f"More: {PAGES[words[0]]}; exit codes and JSON: docs/reference/command-line.md"


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _group(option: str, command: str) -> str:
    if command in (*_EVALUATED, "bench") and option in _EVALUATION:
        return "Evaluation"
    return next(group for group, options in GROUPS.items() if option in options)
