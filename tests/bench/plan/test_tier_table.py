"""The tiers of --print-plan: what each rank has in each, and what is predicted to move."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench.plan.plan_table import costs_at, print_plan
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.row_counts import write_counts
from tests.pipelines import changed


def tiers_of(text: str) -> list[tuple[float, ...]]:
    """GB on the device and in host memory, rows missed, MB each way and us of each rank."""
    found = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+) +([\d,]+) +([\d.]+) +(\d+) *$", text, re.MULTILINE)
    return [tuple(float(value.replace(",", "")) for value in row) for row in found]


def test_tiers_are_shown_with_their_cost(capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(preset("launch-bound"), "static", presort_ids=True, table_memory="0.5", precision="bf16")
    print_plan(config, Topology.one_node(2))
    text = capsys.readouterr().out
    ranks = tiers_of(text)
    assert len(ranks) == 2
    for device, host, missed, megabytes, us in ranks:
        assert device == pytest.approx(host, rel=0.01)
        assert megabytes == pytest.approx(missed * 1024 / 1e6, rel=0.01)  # whole rows and their state
        assert us == pytest.approx(missed / 28, rel=0.01)  # a row of up to 1 KB takes as long
    words = " ".join(text.split())
    (misses,) = re.findall(r"a sample misses ([\d.]+) rows", words)
    assert float(misses) == pytest.approx(sum(missed for _, _, missed, *_ in ranks) / 1024, rel=0.01)
    assert "by the distribution of random ids (Zipf 1.05 for first ids and others by a function of them)" in words
    assert "host memory of a node: 104.5 of 274.9 GB" in words


def test_tiers_by_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows are named as often, and half of them are in host memory."""
    model = replace(preset("smoke").model, num_embeddings=(1000,) * 26)
    options: dict[str, Any] = {"presort_ids": True, "table_memory": "0.5", "table_counts": tmp_path / "counts.npz"}
    config = changed(preset("smoke"), "static", **options, model=model, local_batch_size=4)
    with pytest.raises(FileNotFoundError):
        print_plan(config, Topology.one_node(1))
    write_counts(tmp_path / "counts.npz", model.tables, [np.full(1000, 100, dtype=np.uint32)] * 26, 20_000, {})
    print_plan(config, Topology.one_node(1))
    text = capsys.readouterr().out
    ((_, _, missed, *_),) = tiers_of(text)
    assert missed == pytest.approx(13_000 * -np.expm1(-4 * 100 / 20_000), abs=1)
    assert "Misses by counts.npz, counts of 20,000 samples" in " ".join(text.split())
    with pytest.raises(ValueError, match="is of another model: it has cat_0 of 1000 rows, not cat_0 of 1001 rows"):
        print_plan(changed(config, model=replace(model, num_embeddings=(1001, *(1000,) * 25))), Topology.one_node(1))


def test_shares_of_single_tables_are_shown_and_must_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"presort_ids": True, "table_memory": "0.5", "precision": "bf16"}
    config = changed(preset("launch-bound"), "static", **options, constraints=("9=hbm:1", "0,20=hbm:0.1"))
    print_plan(config, Topology.one_node(2))
    text = capsys.readouterr().out
    assert "as asked: --constraints cat_0,cat_20=hbm:0.1 cat_9=hbm:1" in text
    assert "on the device at any time: 8,000,000 of the 80,000,000 rows of cat_0 cat_20" in text
    assert "on the device at any time: 40,000,000 of the 40,000,000 rows of cat_9" in text
    device, host = (sum(rank[tier] for rank in tiers_of(text)) for tier in (0, 1))
    rows = sum(config.model.tables.rows)
    assert device + host == pytest.approx(rows * 1024 / 1e9, rel=0.01)
    assert device < host
    ample = changed(config, table_memory="1", constraints=("0=hbm:0.9",))
    with pytest.raises(ValueError, match=r"put 205\.0 GB of a rank on the device, which has 133\.9, and 4\.1 GB of a"):
        print_plan(ample, Topology.one_node(1))
    with pytest.raises(ValueError, match=r"--table-memory leaves rank 0 \d+ of .* by --constraints .*cat_9=hbm:1"):
        print_plan(changed(config, table_memory="0.15"), Topology.one_node(2))


def test_nodes_too_small_for_both_tiers_are_refused() -> None:
    config = changed(preset("launch-bound"), "static", presort_ids=True, table_memory="0.8")
    with pytest.raises(ValueError, match=r"share 0\.8\): tables and optimizer state take 209\.1 GB"):
        print_plan(config, Topology.one_node(1))
    ample = costs_at(None, 2000, Topology.one_node(1))
    assert ample.host_memory_bytes == 2 * 10**12
    with pytest.raises(ValueError, match=r"133\.9 GB of device memory for them and 1900\.0 GB of host memory"):
        print_plan(config, Topology.one_node(1), ample)
    with pytest.raises(ValueError, match="--host-memory-gb 0: give GB of a node, above 0"):
        costs_at(None, 0, Topology.one_node(1))
    with pytest.raises(ValueError, match="--table-counts c is for --table-memory: add that, or leave it out"):
        changed(preset("smoke"), "static", table_counts=Path("c"))
