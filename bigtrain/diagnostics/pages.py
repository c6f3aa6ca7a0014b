"""What the pages of runs and of sweeps share: colours and style of their pictures, and how a template is filled."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e6eaee"
_STYLE: Any = {
    "font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "text.color": INK, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "path", "svg.hashsalt": "bigtrain",
    "axes.titlelocation": "left", "axes.titlesize": 10, "axes.titleweight": "bold", "axes.formatter.useoffset": False,
    "xtick.major.size": 0, "ytick.major.size": 0, "font.family": ["DejaVu Sans"],
}  # fmt: skip


@contextlib.contextmanager
def drawing() -> Iterator[Any]:
    """matplotlib's pyplot in this style, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        yield pyplot


def save(figure: Any, png: Path) -> str:
    """Write a figure as PNG; returns it as SVG, for a page."""
    figure.savefig(png, dpi=140)
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    return svg[svg.index("<svg") :]


def fill(package: str, **values: Any) -> str:
    """The page of `package`: its report.html.jinja with these values."""
    import jinja2

    text = resources.files(package).joinpath("report.html.jinja").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text).render(**values)
