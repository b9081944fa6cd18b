"""The report as one HTML file that needs nothing else: no script, no font, no image from anywhere."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harp.reports.html import chart
from harp.reports.html.blocks import Key, Report

_TEMPLATES = Path(__file__).parent / "templates"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_together,
    )
    environment.globals["swatch"] = _swatch
    environment.filters["drawing"] = Markup  # charts escape what they are given
    return environment


def _together(value: object) -> object:
    """Keep a number and its per cent sign on one line; what is marked up already stays as it is."""
    return value.replace(" %", "\u00a0%") if isinstance(value, str) and not isinstance(value, Markup) else value


def _swatch(key: Key) -> Markup:
    return Markup(chart.swatch(key.number, key.joined, key.filled))


def render(report: Report) -> str:
    """The page."""
    style = Markup((_TEMPLATES / "style.css").read_text("utf-8"))
    return _environment().get_template("page.html").render(report=report, style=style)
