import gzip
import json
from pathlib import Path

import pytest

from dlrm_bench.bench.doctor.diagnosis import diagnose
from dlrm_bench.bench.doctor.interpreter_lock import Samples
from dlrm_bench.bench.doctor.page import write_page
from dlrm_bench.bench.doctor.rank_file import RankFile, rank_path, trace_path
from dlrm_bench.bench.doctor.text import heading, overhead, rank_rows
from tests.bench.doctor.made import stock_events, stock_rank


def leave(folder: Path, *ranks: RankFile) -> Path:
    """Puts into the folder what ranks would leave there."""
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        rank_path(folder, rank["rank"]).write_text(json.dumps(rank))
        with gzip.open(trace_path(folder, rank["rank"]), "wt") as file:
            json.dump({"traceEvents": stock_events(False) + stock_events(True)}, file)
    return folder


def test_two_ranks_of_a_gpu(tmp_path):
    slow = stock_rank(1)
    slow["plain"]["ms"] = 1.25
    lock = {"rank0": Samples(100, 25), "rank1": Samples(10, 10)}
    diagnosis, pictures = diagnose(leave(tmp_path, stock_rank(), slow), ["torchrun", "train.py"], 64, lock)
    assert diagnosis["iteration_ms"] == 1.25
    assert [rank["calls"]["sync"] for rank in diagnosis["ranks"]] == [2, 2]
    # A kernel of 100 us and three copies of 9 together, of an iteration and 0.71 ms to the end of the last kernel.
    assert diagnosis["ranks"][0]["gpu_computing_ms"] == pytest.approx(0.109)
    assert diagnosis["ranks"][0]["gpu_idle_fraction"] == pytest.approx(1 - 218 / 1780)
    assert [finding["kind"] for finding in diagnosis["findings"]] == ["sync", "allocator", "tensor_from_list"]
    assert diagnosis["overhead"] == {
        "plain_ms": 1.25,
        "hook_us": 2.0,
        "sampled_ms": 1.0,
        "sample_us": 0.0,
        "period_us": 100.0,
        "samples": 0,
        "traced_ms": 1.2,
        "marked_ms": 1.5,
    }
    timeline = pictures.timeline
    assert timeline.rank == 1
    rows = {bar.row for bar in timeline.bars}
    assert rows == {"calls of torch", "1 sync", "3 tensor_from_list", "GPU: kernels", "GPU: copies"}
    (kernel,) = (bar for bar in timeline.bars if bar.row == "GPU: kernels")
    assert (kernel.start_ms, kernel.ms) == (pytest.approx(0.71), pytest.approx(0.1))
    assert "NVIDIA H200" in heading(diagnosis)
    assert rank_rows(diagnosis)[0] == (
        *("0", "1.000", "1.000", "0.900", "0.800", "1", "0", "2", "1", "1", "1", "1", "0.250", "0.109"),
        f"{1 - 218 / 1780:.0%}",
    )
    assert diagnosis["ranks"][1]["gil_wait_ms"] is None  # too few samples
    assert any("is not known" in note for note in diagnosis["notes"])  # of the slowest rank
    assert diagnosis["parts"]["dense_ms"] == 0.0
    assert "1.500 with calls marked" in overhead(diagnosis)


def test_the_page_needs_nothing_beside_it(tmp_path):
    diagnosis, pictures = diagnose(leave(tmp_path / "ranks", stock_rank()), ["train.py", "<b>"], 64, {})
    write_page(diagnosis, pictures, None, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "torchrec/<wbr>distributed/<wbr>dist_data.py:284" in page
    assert "<b>" not in page
    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    assert page.index("<img") < page.index("<h2>")  # pictures come first, then what they show by number
    assert "overflow-wrap: anywhere" not in page  # which lets a table narrow a column to a letter
    assert "th, td { white-space: nowrap; }" in page
    assert page.count("<li><p><strong>") == len(diagnosis["findings"])


def test_a_script_that_ends_early_is_told_what_it_needs(tmp_path):
    short = stock_rank() | {"complete": False, "steps": 30}
    with pytest.raises(ValueError, match="made 30 iterations on rank 0, and 64 are needed"):
        diagnose(leave(tmp_path, short), [], 64, {})  # type: ignore[arg-type]


def test_an_error_of_the_doctors_own_is_no_diagnosis(tmp_path):
    leave(tmp_path, stock_rank())
    (tmp_path / "rank1.error").write_text("Traceback: of the doctor")
    with pytest.raises(RuntimeError, match="of the doctor"):
        diagnose(tmp_path, [], 64, {})


def test_ranks_of_other_nodes_are_missed_aloud(tmp_path):
    alone = stock_rank()
    alone["world_size"] = 8
    diagnosis, _ = diagnose(leave(tmp_path, alone), [], 64, {})
    assert any("1 of 8 ranks" in note for note in diagnosis["notes"])


def test_a_damaged_file_is_named(tmp_path):
    rank_path(tmp_path, 0).write_text("{")
    with pytest.raises(ValueError, match=r"rank0\.json"):
        diagnose(tmp_path, [], 64, {})
