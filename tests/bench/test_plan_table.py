"""The printed plan names every table once and adds up to what the model needs."""

import re
from dataclasses import replace

import pytest

from bench.plan_table import print_plan
from dlrm.presets import preset


def printed(capsys: pytest.CaptureFixture[str], name: str, world_size: int) -> str:
    print_plan(replace(preset(name), precision="bf16"), world_size)
    return capsys.readouterr().out


def rows(text: str) -> dict[str, list[str]]:
    """Columns, us, and GB of tables and state, by rank."""
    found = re.findall(r"^ +(\d+) .*?(\d+) +(\d+) +([\d.]+) +([\d.]+) *$", text, re.MULTILINE)
    return {rank: values for rank, *values in found}


def test_mlperf_model_on_eight_ranks(capsys):
    text = printed(capsys, "mlperf-dcnv2", 8)
    by_rank = rows(text)
    assert list(by_rank) == [str(rank) for rank in range(8)]
    # 209 GB of tables and state; 18 of the 26 tables are not replicated.
    assert sum(float(tables) + float(state) for _, _, tables, state in by_rank.values()) == pytest.approx(209, rel=0.01)
    assert sum(int(columns) for columns, *_ in by_rank.values()) == 18 * 128
    times = [int(us) for _, us, *_ in by_rank.values()]
    ratio = float(re.findall(r"largest / mean: ([\d.]+)", text)[0])
    assert ratio == pytest.approx(max(times) * 8 / sum(times), abs=1e-3)
    for part in ("[0:32]", "[32:64]", "[64:96]", "[96:128]"):
        assert text.count(f"cat_20{part}") == 1
    for feature in (feature for feature in range(26) if feature != 20):
        assert len(re.findall(rf"cat_{feature}\b(?!\[)", text)) == 1


def test_one_rank_holds_everything(capsys):
    text = printed(capsys, "smoke", 1)
    assert all(re.search(rf"cat_{feature}\b", text) for feature in range(26))
    assert re.search(r"largest / mean: 1\.000", text)
