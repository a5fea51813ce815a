"""Tables of a profiled run."""

from pathlib import Path

import pytest

from dlrm_bench.bench.ladder.analysis import host_cost
from dlrm_bench.bench.profile.kernel_names import STAGES
from dlrm_bench.bench.profile.tables import COUNTS, KERNELS_SHOWN, host_table, kernel_table, timeline_table
from dlrm_bench.bench.records.record import read_record
from tests.bench.made_records import profile, recorded_runs, write


def test_the_tables(tmp_path: Path) -> None:
    profiled = read_record(write(tmp_path / "profiled", recorded_runs()[0], profile=profile())).run
    table = host_table(profiled)
    assert table.row_count == 9 + len(STAGES) + 1
    assert [str(cell).strip() for cell in table.columns[0].cells][1:3] == ["launching thread, ms", "batch-reader, ms"]
    assert "88% idle" in list(table.columns[2].cells)
    kernels, timeline = kernel_table(profiled), timeline_table(profiled)
    assert kernels is not None
    assert kernels.row_count == KERNELS_SHOWN + 1
    assert [next(iter(kernels.columns[i].cells)) for i in (0, 3)] == ["GEMM (nvjet)", "2000.0"]
    assert [list(kernels.columns[i].cells)[-1] for i in (0, 2, 3)] == ["4 others", "4", "370.0"]
    assert timeline is not None
    bars = [str(bar) for bar in timeline.columns[4].cells]
    assert [len(bar) - len(bar.lstrip()) for bar in bars] == [0, 7, 13, 20, 27]  # of 40 for 1.5 ms
    timed = read_record(write(tmp_path / "timed", recorded_runs()[0])).run
    assert kernel_table(timed) is timeline_table(timed) is None
    with pytest.raises(ValueError, match="timed is a timed run, without a profile"):
        host_table(timed)


def test_a_run_for_another_profiler_has_no_counts(tmp_path: Path) -> None:
    clocks = {"cpu_ms": 1.0, "launching_thread_ms": 0.5, "wall_ms": 2.0}
    none = dict.fromkeys(("gpu", "stages_ms", "host_stages_ms", "timeline", "kernels"))
    profiled = read_record(write(tmp_path / "x", recorded_runs()[0], profile={"host": clocks, **none}))
    table = host_table(profiled.run)
    assert list(table.columns[1].cells).count("not counted") == len(COUNTS)
    assert table.row_count == 8
    with pytest.raises(ValueError, match="has no counts of CUDA calls"):
        host_cost(profiled)
