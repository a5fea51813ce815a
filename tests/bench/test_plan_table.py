"""The printed plan names every table once and adds up to what the model needs."""

import re
from dataclasses import replace

import pytest

from dlrm_bench.bench.plan_table import print_plan
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.embedding.plan import make_plan
from dlrm_bench.dlrm.presets import MLPERF_MODEL


def printed(capsys: pytest.CaptureFixture[str], name: str, world_size: int) -> str:
    print_plan(replace(preset(name), precision="bf16"), world_size)
    return capsys.readouterr().out


def rows(text: str) -> dict[str, list[float]]:
    """Columns, us of tables and of all, and GB of tables and state, by rank."""
    found = re.findall(r"^ +(\d+) .*? (\d+) +(\d+) +(\d+) +([\d.]+) +([\d.]+) *$", text, re.MULTILINE)
    return {rank: [float(value) for value in values] for rank, *values in found}


def test_mlperf_model_on_eight_ranks(capsys):
    text = printed(capsys, "mlperf-dcnv2", 8)
    by_rank = rows(text)
    assert list(by_rank) == [str(rank) for rank in range(8)]
    # 209 GB of tables and state; 18 of the 26 tables are not replicated.
    assert sum(sum(values[-2:]) for values in by_rank.values()) == pytest.approx(209, rel=0.02)
    assert sum(columns for columns, *_ in by_rank.values()) == 18 * 128
    for name, at in (("tables", 1), ("all", 2)):
        times = [values[at] for values in by_rank.values()]
        ratio = float(re.findall(rf"{name} ([\d.]+)", text)[0])
        assert ratio == pytest.approx(max(times) * 8 / sum(times), abs=2e-3)
    (iteration,) = re.findall(r"all ranks wait for: (\d+) us", text)
    assert max(us for _, _, us, *_ in by_rank.values()) <= float(iteration)
    plan = make_plan(MLPERF_MODEL, 8, 55296)
    for feature in range(26):
        parts = sorted((int(start), int(end)) for start, end in re.findall(rf"cat_{feature}\[(\d+):(\d+)\]", text))
        if feature in plan.replicated:
            assert len(re.findall(rf"cat_{feature}\b(?!\[)", text)) == 1
        else:
            assert parts == sorted((s.column, s.column + s.columns) for s in plan.shards if s.table == feature)


def test_one_rank_holds_everything(capsys):
    text = printed(capsys, "smoke", 1)
    assert all(re.search(rf"cat_{feature}\b", text) for feature in range(26))
    assert re.search(r"tables 1\.000, all 1\.000", text)
