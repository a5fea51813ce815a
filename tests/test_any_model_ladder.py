"""The table of examples/any_model_ladder.py."""

import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def row(schedule: str, ms: float, switched_off: dict[str, str]) -> dict[str, Any]:
    counts = dict.fromkeys(("kernel_launches", "graph_launches", "stream_syncs", "d2h_copies", "cpu_ms"), 0.0)
    what = {"model": "dlrm", "batch": 64, "schedule": schedule, "ms": ms, "loss_difference": 0.0}
    return {**counts, **what, "gpu_computing_ms": None, "switched_off": switched_off}


def test_a_switch_that_is_off_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    from any_model_ladder import WORKLOADS, table  # type: ignore[import-not-found]

    name = next(iter(WORKLOADS))
    no_gpu = {"cuda_graph": "CUDA graphs need a GPU", "pinned_d2h": "cpu is the host"}
    rows = [row("stock", 3.0, {}), row("five-stage", 2.0, no_gpu), row("+ pinned_d2h", 1.5, no_gpu)]
    rows += [row("+ cuda_graph", 1.5, no_gpu), row("+ trimmed", 1.0, no_gpu), row("+ graphs of dists", 1.0, no_gpu)]
    for each in rows:
        each["model"] = name
    ratios = [line.split(" | ")[4] for line in table([rows]).splitlines()[2:]]
    assert ratios == ["1.00", "1.50", "off", "off", "3.00", "off"]
