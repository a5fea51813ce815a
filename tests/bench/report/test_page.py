"""The page from records of every kind, and in a real browser where there is one."""

import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from dlrm_bench.bench.report import page as page_module
from dlrm_bench.bench.report.output import MANIFEST
from tests.bench.made_records import H200, configured, edit, profile, recorded_runs, write
from tests.bench.report.made_results import make_limits, make_results

RUNS = recorded_runs()
DRAWN = page_module.png_of
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, and a single dot stands for each: to draw them takes most of a report's time."""
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, format="png")
    monkeypatch.setattr(page_module, "png_of", lambda figure: buffer.getvalue())


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of everything."""
    return make_results(tmp_path / "results", monkeypatch)


def write_report(paths: list[Path], out: Path) -> Path:
    """The page, made without a terminal."""
    return page_module.write_report(paths, out, Console(file=io.StringIO())).page


@pytest.mark.slow
def test_the_page_is_one_small_file_that_loads_nothing(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "png_of", DRAWN)
    page = write_report([results], tmp_path / "out")
    text = page.read_text()
    assert page.stat().st_size < 2e6
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    HTMLParser().feed(text)
    assert re.findall(r"<h2 id=\"(\w+)\"", text) == ["others", "floor", "published", "machines"]
    drawn = {picture.stem for picture in (tmp_path / "out").glob("*.png")}
    assert len(drawn) == text.count("<img ") >= 10
    for kind in ("ladder", "distributions", "kernels", "roofline", "stages_gpu", "stages_host", "timelines"):
        assert f"headline-{kind}" in drawn
    for kind in ("distributions", "stages_gpu", "stages_host", "timelines"):
        assert f"runs-in-no-ladder-{kind}" in drawn
    first = text.index("<img ")
    assert text.index("Median latency of each rung") < text.index("<table>")  # the headline ladder's picture
    assert first < text.index("<details>")
    assert "profiled-&lt;b&gt;" in text
    assert "<b>" not in text
    assert "<summary>throttled (power cap): 1 run</summary>" in text
    assert "<li>runs in no ladder: 1</li>" in text
    assert re.search(r"</strong>\s*stock [\d.]+ ms, same [\d.]+ ms: [\d.]+ \([\d.]+ to [\d.]+\) times as fast", text)
    assert "0.00000" not in text
    assert re.search(
        r"<td>fast</td><td>3</td>[^r]*<td>[\d,]+</td><td>\d+\.\d %</td><td>unknown</td><td>500</td><td>1980</td></tr>",
        text,
    )
    assert "<strong>fast</strong>: Half of the work." in text
    assert "<td>missing</td>" not in text  # of rungs without profiled runs nothing is said
    assert re.search(r"<td>fast</td><td>12.000</td>(<td>12</td>){4}<td>88%</td>", text)
    assert re.search(r"<td>GEMMs</td><td>dense forward backward</td><td>30</td><td>2500.0</td><td>1000.0</td>", text)
    assert re.search(r"<td>element-wise 0</td><td>other</td><td>1</td><td>100.0</td><td>not known</td>", text)


def test_kernels_without_limits_and_profiled_runs_without_counts(tmp_path: Path) -> None:
    write(tmp_path / "results" / "counted", RUNS[0], profile=profile())
    none = dict.fromkeys(("gpu", "stages_ms", "host_stages_ms", "timeline", "kernels"))
    clocks = {"cpu_ms": 1.0, "launching_thread_ms": 1.0, "wall_ms": 2.0}
    write(tmp_path / "results" / "nvtx", RUNS[0], profile={"host": clocks, **none})
    text = write_report([tmp_path / "results"], tmp_path / "out").read_text()
    assert "no limits record of this work" in text
    assert re.search(r"<td>nvtx</td><td>1.000</td><td>2.000</td>\s*(<td>missing</td>\s*){5}", text)


def test_published_results_have_the_caveats_of_their_own_benchmark(tmp_path: Path) -> None:
    write(tmp_path / "results" / "timed", RUNS[0])
    text = write_report([tmp_path / "results"], tmp_path / "out").read_text()
    assert "<li>DLRM-DCNv2: Published runs read the Criteo data set" in text
    assert "<li>DLRMv4: The reference&#39;s runs read Yambda&#39;s events." in text
    assert re.search(r"<td>8 x B200</td><td>[^<]*</td><td>8192</td><td>631.70</td><td></td><td></td>", text)


def test_a_profiled_run_with_empty_blocks_has_missing_cells(tmp_path: Path) -> None:
    edit(write(tmp_path / "results" / "profiled", RUNS[0], profile=profile()), host={}, gpu={"computing_ms": 1.0})
    text = write_report([tmp_path / "results"], tmp_path / "out").read_text()
    assert re.search(r"<td>profiled</td>\s*(<td>missing</td>\s*){8}</tr>", text)


def test_kernels_beside_their_ceilings_come_before_newer_ones(tmp_path: Path) -> None:
    write(tmp_path / "results" / "a-known", RUNS[0], profile=profile())
    for i in range(3):
        other = configured(local_batch_size=64)
        write(tmp_path / "results" / f"b-{i}", RUNS[0], minute=i + 1, config=other, profile=profile())
    make_limits(tmp_path / "results" / "limits")
    text = write_report([tmp_path / "results"], tmp_path / "out").read_text()
    assert "a-known: the longest kernels of an iteration, beside the ceilings of limits." in text


def test_a_floor_of_other_work_or_another_machine_says_so(tmp_path: Path) -> None:
    config = configured(precision="bf16")
    machine = {**H200, "hosts": ["node1"]}
    folder = tmp_path / "results"
    write(folder / "timed", RUNS[0], config=config, machine=machine)
    write(folder / "profiled", RUNS[1], config=config, machine=machine, profile=profile())
    for i, host in enumerate(("node0", "node1", "node2")):
        created = f"2026-11-21T00:0{i}:00+00:00"
        make_limits(folder / f"limits-{host}", machine={**H200, "hosts": [host]}, created=created)
    text = write_report([folder], tmp_path / "out").read_text()
    assert "on this machine" not in text
    precision, host = "precision bf16, beside limits of tf32", "host node1, beside limits of node2"
    timed = "median latency beside the floor of limits"
    assert f"{timed}-node2. Doubtful: {precision} (timed). Doubtful: {host} (timed).<" in text
    stages = "stages of profiled beside the floor of limits-node2."
    assert f"{stages} Doubtful: {precision} (profiled). Doubtful: {host} (profiled).<" in text
    assert (
        f"<summary>profiled, beside limits-node1; {precision}</summary>" in text
    )  # of its machine, and not the newest
    assert re.search(r"<td>hosts</td><td[^>]*>node1</td>", text)


def test_the_page_opens_with_the_ladder_that_is_named(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "ladder", results / "again")
    (results / "again" / "ladder.json").write_text((results / "ladder" / "ladder.json").read_text())
    for i, run in enumerate(sorted((results / "again").glob("*/run.json"))):
        edit(run.parent, created=f"2026-12-01T00:{i:02d}:00+00:00")
    ladder = results / "again" / "ladder.json"
    ladder.write_text(json.dumps({**json.loads(ladder.read_text()), "created": "2026-12-01T01:00:00+00:00"}))
    for name in ("ladder", "again"):
        console = Console(file=io.StringIO())
        text = page_module.write_report([results], tmp_path / name, console, results / name).page.read_text()
        assert text.index(f"{name}: median latency of an iteration on each rung") < text.index('id="headline"')
    with pytest.raises(ValueError, match=r"--first .*timed-1 is not a ladder"):
        page_module.write_report([results], tmp_path / "out", console, results / "timed-1")


def test_a_page_from_one_record(tmp_path: Path) -> None:
    record = write(tmp_path / "one", RUNS[0])
    text = write_report([record], tmp_path / "out").read_text()
    assert "Latency of each configuration" in text
    assert 'id="others"' not in text


def test_unfinished_runs_and_copies_are_named(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "timed-1", results / "copy")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    console = Console(file=io.StringIO())
    written = page_module.write_report([results], tmp_path / "out", console)
    unfinished = f"{results / 'unfinished'} is an unfinished run and is left out"
    copy = f"{results / 'timed-1'} holds the same run as {results / 'copy'}, and counts once"
    assert written.notes == [unfinished, copy, f"left alone in {tmp_path / 'out'}, not a report's: mine.txt"]
    text = written.page.read_text()
    assert unfinished in text
    assert copy in text


def test_a_second_report_replaces_the_first(results: Path, tmp_path: Path) -> None:
    write_report([results], tmp_path / "out")
    write_report([results / "timed-1"], tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "headline-ladder.png" not in names
    assert {"index.html", MANIFEST, "headline-distributions.png"} <= names


def test_progress_names_folders_and_pictures_on_a_terminal_alone(results: Path, tmp_path: Path) -> None:
    said = {}
    for terminal in (True, False):
        file = io.StringIO()
        page_module.write_report(
            [results], tmp_path / f"{terminal}", Console(file=file, force_terminal=terminal, width=200)
        )
        said[terminal] = file.getvalue()
    assert f"reading {results / 'ladder'}" in said[True]
    assert f"reading {results / 'timed-1'}" in said[True]
    assert "drawing headline-ladder" in said[True]
    assert said[False] == ""


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to report in"):
        write_report([tmp_path], tmp_path / "out")
    with pytest.raises(ValueError, match="absent does not exist"):
        write_report([tmp_path / "absent"], tmp_path / "out")
    (tmp_path / "cut" / "run").mkdir(parents=True)
    (tmp_path / "cut" / "run" / "result_0.txt").touch()
    with pytest.raises(ValueError, match=r"nothing to report in .*cut: .*; 1 unfinished runs"):
        write_report([tmp_path / "cut"], tmp_path / "out")
    (write(tmp_path / "damaged", RUNS[0]) / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"damaged/run\.json is corrupt"):
        write_report([tmp_path], tmp_path / "out")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [500, 1000])
def test_in_a_browser_nothing_fails_and_nothing_sticks_out(results: Path, tmp_path: Path, width: int) -> None:
    """No table is cut at some 100 columns, 1000 pixels, either; on a phone tables scroll."""
    page = write_report([results], tmp_path / "out")
    # The page reports on itself: whether all pictures were drawn, whether it is wider than the window, and which tables
    # are wider than their place.
    probe = (
        "<script>onload = () => { document.querySelectorAll('details').forEach(each => each.open = true);"
        "const cut = [...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth);"
        "const said = innerWidth < 900 ? [] : cut.map(each => each.innerText.split('\\n')[0]);"
        "document.title = [[...document.images].every(i => i.naturalWidth > 0), "
        "document.documentElement.scrollWidth <= innerWidth, ...said].join(); }</script>"
    )
    page.write_text(page.read_text().replace("</body>", f"{probe}</body>"))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={tmp_path / 'profile'} --dump-dom"
    flags += f" --window-size={width},900 --virtual-time-budget=5000 --enable-logging=stderr"
    browser = subprocess.run(
        [str(CHROMIUM), *flags.split(), page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert re.findall("<title>(.*?)</title>", browser.stdout, re.DOTALL) == ["true,true"]
    assert "CONSOLE" not in browser.stderr
