"""A diagnosis as one self-contained HTML page."""

import base64
import io
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from . import text
from .baseline import Comparison
from .diagnosis import Diagnosis, Timeline
from .picture import timeline_figure
from .site_folder import PACKAGE

_DPI = 160


def write_page(diagnosis: Diagnosis, timeline: Timeline, comparison: Comparison | None, path: Path) -> None:
    """Writes the page; the picture is in it."""
    picture = io.BytesIO()
    timeline_figure(timeline).savefig(picture, format="png", dpi=_DPI)
    environment = Environment(loader=PackageLoader(PACKAGE, "templates"), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("page.html").render(
        d=diagnosis,
        heading=text.heading(diagnosis).splitlines(),
        overhead=text.overhead(diagnosis),
        columns=text.COLUMNS,
        rows=text.rank_rows(diagnosis),
        places=text.places,
        predictions=list(text.prediction_lines(diagnosis)),
        changes=[] if comparison is None else list(text.comparison_lines(comparison)),
        picture=base64.b64encode(picture.getvalue()).decode("ascii"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
