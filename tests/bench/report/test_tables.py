"""Tables from made records: bold cells, cells of one run, and an index's cells for each record."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.compare.comparison import compare_all, compare_paths
from dlrm_bench.bench.ladder.run_ladder import run_ladder
from dlrm_bench.bench.report.page import write_report
from dlrm_bench.bench.report.rounding import with_interval
from dlrm_bench.bench.report.tables import KINDS, LUCK, _faster, _pair, _ratio_cell, _result
from dlrm_bench.bench.stats.series import AUTO_CONFIDENCE
from tests.bench.ladder.made_ladders import made as made
from tests.bench.ladder.made_ladders import plan, pretend_runs
from tests.bench.made_records import edit, recorded_runs, write
from tests.bench.report.made_results import make_results

RUNS = recorded_runs()


def pair(folder: Path, factor: float, runs: int = 4) -> None:
    """Writes `runs` runs of a and of b, in the order a b b a, b taking `factor` times as long."""
    for i in range(runs):
        for place, side in enumerate("ab"):
            minute = 2 * i + (place if i % 2 == 0 else 1 - place)
            scale = (factor if side == "b" else 1.0) * (1 + 0.02 * ((i * 7 + place * 3) % 5))
            write(folder / side / str(i), RUNS[0] * scale, minute=minute)


def test_a_proven_difference_is_bold_and_another_is_not(tmp_path: Path) -> None:
    pair(tmp_path / "twice", 0.5)
    pair(tmp_path / "same", 1.0)
    lines = ["what | where | a | b", "twice | twice | a | b", "the same | same | a | b"]
    heading, twice, same = KINDS["times"](tmp_path, lines)
    assert heading == ["what", "a, ms", "b, ms", "times as fast (95 % interval)", "runs"]
    assert twice[3].startswith("**")
    assert twice[3].endswith("**")
    assert float(twice[3].strip("*").partition(" ")[0]) == pytest.approx(2, rel=0.05)
    assert "*" not in same[3]
    assert (twice[4], same[4]) == ("[4](twice)", "[4](same)")
    assert float(twice[1]) == pytest.approx(2 * float(twice[2]), rel=0.05)


def test_a_sustained_table_has_the_clock_and_the_gpus_and_no_short_run(tmp_path: Path) -> None:
    """Medians of 50 ms, and 51 by the clock: every tenth iteration takes 60. 250 of them take 12.75 s."""
    times = np.tile(np.r_[np.full(9, 50.0), 60.0], 25)
    for i in range(2):
        for place, (name, factor) in enumerate((("a", 2.0), ("b", 1.0))):
            write(tmp_path / name / str(i), times * factor * (1 + i / 100), minute=2 * i + (i ^ place))
    lines = ["what | where | a | b", "twice | . | a | b"]
    heading, row = KINDS["sustained"](tmp_path, lines)
    assert heading[1:] == [
        *("a, ms (by clock)", "b, ms (by clock)", "times as fast (95 % interval)", "b: W a GPU", "MHz", "runs")
    ]
    assert row[:3] == ["twice", "100.5 (102.5)", "50.25 (51.25)"]
    assert row[3] == KINDS["times"](tmp_path, lines)[1][3]
    assert row[4:] == ["500", "1980", "2"]
    write(tmp_path / "short", times[:190], minute=9)
    with pytest.raises(ValueError, match=r"short has a run of 9\.\d s, but 10 are needed: run it with --min-time"):
        KINDS["sustained"](tmp_path, [lines[0], "x | . | a | short"])


def test_one_run_has_no_interval(tmp_path: Path) -> None:
    pair(tmp_path, 0.5, runs=1)
    (_, row) = KINDS["times"](tmp_path, ["what | where | a | b", "x | . | a | b"])
    assert float(row[3]) == pytest.approx(2, rel=0.1)  # no interval, nothing bold
    assert row[4] == "1"


def test_a_narrow_interval_has_a_dagger_and_is_not_bold() -> None:
    assert _ratio_cell(2.0, [1.9, 2.1], is_proven=True, by_luck=True) == f"2.00 (1.900 to 2.10) {LUCK}"
    assert _ratio_cell(2.0, [1.9, 2.1], is_proven=True, by_luck=False) == "**2.00 (1.900 to 2.10)**"


def test_a_rung_that_a_lucky_one_is_compared_with_has_no_dagger() -> None:
    """Of record 09 launch-threads agrees with pinned-d2h, the rung before, and with nothing else."""
    rows = {row[0]: row[3:5] for row in KINDS["rungs"](next((ROOT / "results").glob("09-*")), [])[1:]}
    daggers = {name: [LUCK in cell for cell in cells] for name, cells in rows.items()}
    assert daggers.pop("launch-threads") == [False, True]
    assert rows["launch-threads"][0].startswith("**")
    assert not any(map(any, daggers.values()))


def test_rungs_show_their_host_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = make_results(tmp_path / "results", monkeypatch) / "ladder"
    heading, stock, fast, same = KINDS["rungs"](ladder, [])
    assert heading[:5] == ["rung", "median, ms", "p99, ms", "times as fast as stock, 3 rounds", "as the rung before"]
    assert heading[5:] == ["CPU, ms", "launches, graphs, syncs, reads"]
    assert stock[3:5] == ["", ""]
    assert fast[0] == "fast"
    assert fast[4] == ""  # the first rung is the rung before
    assert same[4] != ""
    assert fast[5:] == ["12.000", "12, 12, 12, 12"]
    assert same[5:] == ["", ""]  # its profiled run failed


def test_a_comparison_that_a_ladder_has_is_the_ladders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = make_results(tmp_path / "results", monkeypatch)
    rungs = KINDS["rungs"](results / "ladder", [])
    lines = [
        "what | where | a | b",
        "fast | ladder | stock | fast",
        "same | ladder | stock | same",
        "last | ladder | fast | same",
        "back | ladder | same | fast",
    ]
    _, fast, same, last, back = KINDS["times"](results, lines)
    assert [fast[3], same[3], last[3]] == [rungs[2][3], rungs[3][3], rungs[3][4]]
    assert float(back[3].strip("*").partition(" ")[0]) == pytest.approx(2, rel=0.2)  # none is judged over a later one
    assert fast[4] == "[3](ladder)"


def test_an_index_shows_the_ladders_own_comparison(made: Path) -> None:
    """Less a drift, and corrected for the whole ladder; `compare` alone has another interval."""
    text = "<!-- table: times\nwhat | where | a | b\nx | . | a | b\n-->\n"
    ladder_cell, (_, (_, a, b)) = KINDS["rungs"](made, [])[2][3], _pair(made, "x | . | a | b")
    assert _faster(compare_all([("", a, b)])[0]) != ladder_cell
    assert _result(made, text).endswith(f" ms, times as fast: {ladder_cell}")


def test_intervals_of_auto_ladders_are_97_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runs(monkeypatch)
    ladder = tmp_path / "ladder"
    ladder.mkdir()
    list(run_ladder(plan(rounds=6, detect=5.0), ladder))
    pair(tmp_path / "pair", 0.5)
    lines = ["what | where | a | b", "first | ladder | a | b", "back | ladder | c | a"]
    heading, first, back = KINDS["times"](tmp_path, lines)
    assert heading[3] == "times as fast (97 % interval)"
    assert first[3] == KINDS["rungs"](ladder, [])[2][3]
    (result,) = compare_paths([ladder / "c", ladder / "a"])
    assert with_interval(*result.speedup) in back[3]
    assert result.confidence == AUTO_CONFIDENCE
    assert KINDS["times"](tmp_path, [*lines, "x | pair | a | b"])[0][3] == "times as fast (95 % or 97 % interval)"
    page = write_report([ladder], tmp_path / "page", Console(file=io.StringIO())).page.read_text()
    assert page.count("<th>97 % interval</th>") == 2
    assert "of 95 %, or of 97 % where --rounds auto ended the ladder" in page


def test_latencies_are_those_of_the_records(tmp_path: Path) -> None:
    write(tmp_path / "one", np.full(80, 2.0))
    assert KINDS["latencies"](tmp_path, ["what | path", "words | one"]) == [
        ["what", "runs", "median, ms", "p99, ms", "99.9 %, ms", "mean, ms"],
        ["words", "1", "2.000", "2.000", "2.000", "2.000"],
    ]


def aucs(folder: Path, side: str, values: list[float]) -> None:
    for seed, auc in enumerate(values):
        run = write(folder / f"{side}-{seed}", RUNS[0])
        training = {"losses": {"first": 0.7, "last": 0.6}, "auc": auc, "target": None, "epoch_num": 1.0}
        edit(run, training={**training, "best_auc": None, "status": "success"})


def test_auc_has_the_interval_of_the_differences(tmp_path: Path) -> None:
    aucs(tmp_path, "a", [0.80, 0.81, 0.82])
    aucs(tmp_path, "b", [0.801, 0.813, 0.822])
    rows = KINDS["auc"](tmp_path, [". | a | b"])
    assert rows[0] == ["seed", "a", "b", "b - a"]
    assert rows[2] == ["1", "0.810000", "0.813000", "+0.003000"]
    # Differences 1, 3 and 2 thousandths: 2 +- 4.303 * 1 / sqrt(3).
    assert rows[-1][-1] == "+0.00200 (-0.00048 to +0.00448)"
    aucs(tmp_path, "a-wide", [0.9, 0.9])  # of another side, whose name begins as a's
    assert KINDS["auc"](tmp_path, [". | a | b"]) == rows


@pytest.mark.parametrize(
    ("lines", "says"), [([], "one line is needed"), ([". | a | b"], "seeds 0, 1 of a.*0, 1, 2 of b")]
)
def test_auc_leaves_no_run_out_in_silence(lines: list[str], says: str, tmp_path: Path) -> None:
    aucs(tmp_path, "a", [0.80, 0.81])
    aucs(tmp_path, "b", [0.801, 0.813, 0.822])
    with pytest.raises(ValueError, match=says):
        KINDS["auc"](tmp_path, lines)


def test_an_index_takes_own_words_or_what_the_files_say(tmp_path: Path) -> None:
    for name in ("01-words", "02-pair"):
        (tmp_path / name).mkdir()
    (tmp_path / "01-words" / "README.md").write_text("# 01: one\n\n- Machine: CPU\n- Result: two\n  lines\n- Note: x\n")
    pair(tmp_path / "02-pair", 0.5, runs=1)
    table = "<!-- table: times\nwhat | where | a | b\nx | . | a | b\n-->\n<!-- end of table -->\n"
    (tmp_path / "02-pair" / "README.md").write_text(f"# 02: another\n\n- Machine: CPU\n\n{table}")
    heading, words, measured = KINDS["records"](tmp_path, [])
    assert heading == ["record", "what it shows", "machine", "result"]
    assert words == ["[01](01-words)", "one", "CPU", "two lines"]
    assert measured[:3] == ["[02](02-pair)", "another", "CPU"]
    assert measured[3].endswith(", one run")
    (tmp_path / "02-pair" / "README.md").write_text("# 02: another\n\n- Machine: CPU\n")
    with pytest.raises(ValueError, match="neither a line '- Result"):
        KINDS["records"](tmp_path, [])
    (tmp_path / "02-pair" / "README.md").write_text("# another\n")
    with pytest.raises(ValueError, match="needs a heading '# 02"):
        KINDS["records"](tmp_path, [])
