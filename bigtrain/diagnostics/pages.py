"""What the pages of runs and of sweeps share: colours and style of their pictures, and how a template is filled."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from bigtrain.errors import UsageError

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
    figure.set_layout_engine("none")  # where all stands is known now: finding it again would take most of the second drawing
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    return svg[svg.index("<svg") :]


def fill(package: str, **values: Any) -> str:
    """The page of `package`: its report.html.jinja with these values."""
    import jinja2

    text = resources.files(package).joinpath("report.html.jinja").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text).render(**values)


# What a script has written into a page of docs/results stands between these.
TABLE_BEGINS, TABLE_ENDS = "<!-- a script writes from here -->", "<!-- to here -->"


def put_table(page: Path, text: str) -> None:
    """Write a script's text into a page: between the two marks, at the end of a page without them. All else there stays.

    Raises:
        UsageError: the page has one of the marks without the other.
    """
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    before, begins, rest = old.partition(TABLE_BEGINS)
    _, ends, after = rest.partition(TABLE_ENDS)
    if bool(begins) != bool(ends) or TABLE_ENDS in before:
        raise UsageError(
            f"{page} has '{TABLE_BEGINS}' without '{TABLE_ENDS}' behind it, or the other way: put it back, or remove both"
        )
    if before.strip() and not begins:
        before = before.rstrip("\n") + "\n\n"
    after = after if ends else "\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{before}{TABLE_BEGINS}\n{text.strip()}\n{TABLE_ENDS}{after}", encoding="utf-8")
