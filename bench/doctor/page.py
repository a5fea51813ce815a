"""A diagnosis as one self-contained HTML page."""

import base64
import io
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image

from . import text
from .baseline import Comparison
from .diagnosis import Diagnosis, Pictures
from .flame import svg
from .picture import ranks_figure, timeline_figure
from .site_folder import PACKAGE

_DPI = 160


def write_page(diagnosis: Diagnosis, pictures: Pictures, comparison: Comparison | None, path: Path) -> None:
    """Writes the page; the pictures are in it."""
    ranks = ranks_figure(pictures.together)
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
        timeline=_png(timeline_figure(pictures.timeline)),
        side_by_side="" if ranks is None else _png(ranks),
        flame=svg(pictures.flame),
        cost=text.cost,
        details=text.details,
        lines=text.line_rows(diagnosis),
        collectives=list(text.collective_lines(diagnosis)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _png(figure: Figure) -> str:
    """Returns the base64 of a PNG with a palette, enough for the few colours of a chart: a third of the bytes."""
    drawn, picture = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    Image.open(drawn).convert("RGB").quantize(64).save(picture, format="png", optimize=True)
    return base64.b64encode(picture.getvalue()).decode("ascii")
