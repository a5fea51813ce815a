"""Which pictures a report has, and what stands in them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from dlrm_bench.bench.compare.sides import read_side
from dlrm_bench.bench.mlperf.log import MLPerfLog
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.report import plots
from dlrm_bench.bench.report.families import families
from dlrm_bench.bench.report.pictures import Picture, numbered, of_family, published, series_marks
from dlrm_bench.bench.report.published import PUBLISHED
from dlrm_bench.bench.report.sources import Sources
from dlrm_bench.bench.stats.series import summary_statistics
from dlrm_bench.dlrm.dcnv2 import ruleset
from tests.bench.made_records import edit, recorded_runs, trained, write
from tests.bench.report.test_families import ladder_of, proven  # noqa: F401 (a fixture that made ladders need)

RUNS = recorded_runs()


def test_beside_published_results_stand_runs_of_their_global_batch(tmp_path: Path) -> None:
    """Made records have two ranks, whatever their machine."""
    sources = Sources()
    made = ((2, "older", 27648), (4, "old", 27648), (4, "newer", 27648), (2, "newest", 27648), (8, "other batch", 512))
    for number, (gpus, name, batch) in enumerate(made):
        runs = ladder_of(tmp_path / name, gpus=gpus, rungs=number + 1, created=str(number), batch=batch)
        sources.ladders.append(runs)
    (picture,) = published(families(sources), [])
    names = [" ".join(label.get_text().split()) for label in picture.draw().axes[0].get_yticklabels()]
    same = [row for row in PUBLISHED["dlrm_dcnv2"] if row.global_batch_size == 55296]
    assert len(names) == len(same) + 4  # first rung and fastest of the two newest
    assert {name.split(":")[0] for name in names[len(same) :]} == {"2 x H200, newest", "4 x H200, newer"}
    assert all(name.endswith(", 55296") for name in names)


def test_nothing_stands_beside_published_results_that_does_not_compare(tmp_path: Path) -> None:
    sources = Sources(ladders=[ladder_of(tmp_path / "other batch", gpus=8, rungs=2, created="0")])
    assert published(families(sources), []) == []


def test_the_references_logs_of_dlrmv4_stand_beside_each_other() -> None:
    """A log of one of its batches beside the published mean, in a picture of this benchmark alone."""
    logs = sorted((Path(__file__).parents[2] / "data/mlperf_logs/amd_dlrmv4_reference/gbs_16384").glob("*.log"))
    (picture,) = published([], [read_side(logs[0])])
    assert picture.name == "published-dlrmv4"
    names = [" ".join(label.get_text().split()) for label in picture.draw().axes[0].get_yticklabels()]
    assert names == ["16 x MI350X, reference, AMD v6.1, 16384", f"log {logs[0].name}, 16384"]


def test_repeated_names_get_numbers() -> None:
    """As those of ladders in 63/ladder and 63-ladder."""
    made = [Picture(kind="ladder", name=name, alt="", caption="", draw=Figure) for name in ("a", "a", "a-2", "b")]
    taken = set[str]()
    assert [picture.name for picture in numbered(made, taken)] == ["a", "a-2", "a-2-2", "b"]
    assert [picture.name for picture in numbered(made[:1], taken)] == ["a-3"]


def test_the_distributions_show_the_medians_of_the_tables(tmp_path: Path) -> None:
    """The geometric mean of the runs' medians, and not the median of all iterations together."""
    long, short = np.full(200, 1.0), np.full(50, 4.0)
    for i, run in enumerate((long, short)):
        write(tmp_path / str(i), run, minute=i)
    (family,) = families(Sources(timed=[read_record(tmp_path / str(i)) for i in range(2)]))
    (drawn,) = [each for each in of_family(family, {}, [], headline=True) if each.kind == "distributions"]
    assert "2.000" in [text.get_text() for text in drawn.draw().axes[0].texts]
    assert family.sides["0"].metrics()["p50"] == pytest.approx(2.0)


def write_evaluated(folder: Path, epochs: Sequence[float]) -> Path:
    """A record of 260 iterations, whose MLPerf log has evaluations at these parts of the epoch."""
    outcome = trained(status="success", epoch_num=epochs[-1], auc=0.8, target=0.8)
    write(folder, RUNS[0], training=outcome)
    log = MLPerfLog(folder / "result_0.txt")
    log.init_start()
    log.hyperparameters(ruleset.hyperparameters(preset("smoke"), 1, 520, 1))
    log.init_stop()
    log.run_start()
    for epoch in epochs:
        log.eval_start(epoch)
        log.eval_accuracy(epoch, 0.8)
        log.eval_stop(epoch)
    log.close("success", epochs[-1])
    return folder


def test_evaluations_are_marked_where_the_log_has_them(tmp_path: Path) -> None:
    folder = write_evaluated(tmp_path / "trained", (0.25, 0.5))
    assert list(series_marks(read_record(folder)).evals) == [130, 260]


def test_a_resumed_run_marks_the_evaluations_of_its_own_iterations(tmp_path: Path) -> None:
    """Its log begins with that of the run before, and its latencies with the iteration after the checkpoint."""
    folder = write_evaluated(tmp_path / "resumed", (0.25, 0.5, 0.75, 1.0))
    resumed = {"run_id": "before", "iteration": 260, "read_s": 1.0}  # at the half, after its evaluation
    edit(folder, checkpoints={"saved": [], "resumed": resumed})
    assert list(series_marks(read_record(folder)).evals) == [130, 260]


def texts_overlap_or_stick_out(figure: Figure) -> list[str]:
    """Names the texts of a figure that overlap one another or its edge."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    drawn = {text: text.get_window_extent(canvas.get_renderer()) for text in texts}
    for axes in figure.axes:  # ticks beyond the axis exist, and are not drawn
        for tick in axes.xaxis.majorTicks:
            box = drawn.get(tick.label1)
            if box is not None and not axes.bbox.x0 - 1 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1 + 1:
                del drawn[tick.label1]
    boxes = [(text.get_text(), box) for text, box in drawn.items()]
    edge = figure.bbox.padded(1)
    bad = [name for name, box in boxes if box.x0 < edge.x0 or box.x1 > edge.x1 or box.y0 < edge.y0 or box.y1 > edge.y1]
    for i, (name, box) in enumerate(boxes):
        bad += [f"{name} | {other}" for other, its in boxes[i + 1 :] if box.padded(-1).overlaps(its.padded(-1))]
    return bad


def test_labels_do_not_overlap() -> None:
    long = "20261121T005946Z-8xh200-launch-bound-with-a-long-name"
    values = {f"{long}-{i}": RUNS[i] * 10 ** (i / 4) for i in range(12)} | {"same": RUNS[0], "again": RUNS[0]}
    series = {name: (each, summary_statistics(each)) for name, each in values.items()}
    figures = (
        plots.distributions(series),
        plots.work([(f"a kernel with a rather long name {i}", 10.0**i, 2.0 if i % 2 else None) for i in range(5)]),
        plots.above_floor([(f"rung {i}", 0.3, 10.0 / (i + 1)) for i in range(16)]),
        plots.published([(f"8 x H200, {long}-{i}, 55296", 3.0 + i, i % 2 == 0) for i in range(16)]),
    )
    assert [texts_overlap_or_stick_out(figure) for figure in figures] == [[]] * len(figures)
