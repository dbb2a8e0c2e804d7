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
