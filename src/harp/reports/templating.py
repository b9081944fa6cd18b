"""The templates of pages, cards and leaderboard files, in `templates/`."""

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_eval_context
from jinja2.nodes import EvalContext
from markupsafe import Markup

FOLDER = Path(__file__).parent / "templates"


@cache
def environment() -> Environment:
    """All templates; values are escaped in those whose name ends with .html."""
    templates = Environment(
        loader=FileSystemLoader(FOLDER, encoding="utf-8"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_keep_together,
    )
    templates.filters |= {"count": "{:,}".format, "md": markdown_text, "percent": _percent}
    return templates


@pass_eval_context
def _keep_together(context: EvalContext, value: object) -> object:
    """Keep a number and its per cent sign on one line of a page."""
    plain = context.autoescape and isinstance(value, str) and not isinstance(value, Markup)
    return str(value).replace(" %", "\u00a0%") if plain else value


def _percent(share: float, digits: int = 1) -> str:
    return f"{share:.{digits}%}"


def render(template: str, /, **values: object) -> str:
    """A template with values."""
    return environment().get_template(template).render(**values)


def markdown_text(text: object) -> str:
    """Text that Markdown shows as it is: on one line, without markup, tags or borders of cells."""
    line = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", line)
