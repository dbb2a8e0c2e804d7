"""Static pages that read offline, light and dark, on any width."""

from __future__ import annotations

import io
from importlib import resources
from pathlib import Path

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

# Colour-blind safe (Okabe-Ito), readable on white and on near-black alike.
PURE, MIXED, BASELINE = "#0072B2", "#D55E00", "#7f7f7f"
WIDE_IN = 7.0  # of a plot over the page's width


def write_page(path: Path, template: str, **values: object) -> None:
    """Fill a template of this folder and write the page, whole or not at all."""
    folder = resources.files("tasks")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string((folder / template).read_text())
    text = page.render(style=(folder / "page.css").read_text(), **values)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def margins(figure: Figure, left: float, bottom: float, top: float, right: float = 0.1) -> None:
    """In inches; a layout that looks for them takes matplotlib longer than all the rest."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=left / width, right=1.0 - right / width,
        bottom=bottom / height, top=1.0 - top / height,
    )  # fmt: skip


def svg(figure: Figure) -> str:
    """Inline SVG in the page's own text colour and font."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "coral"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return text.replace("#000000", "currentColor").replace(
        "stroke: #262626", "stroke: currentColor"
    )
