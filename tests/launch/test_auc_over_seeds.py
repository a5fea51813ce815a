import json
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.launch import auc_over_seeds
from tests.bench.records.full_disk import fails_after
from tests.launched import free_port


def test_the_interval_is_that_of_the_differences() -> None:
    stock = [0.80, 0.81, 0.79, 0.82, 0.80]
    summary = auc_over_seeds._summary(
        {"stock": stock, "static": [auc + d for auc, d in zip(stock, range(5), strict=True)]}
    )
    difference = summary["static_minus_stock"]
    assert difference["mean"] == pytest.approx(2)
    # Student's t of 4 degrees of freedom times sqrt(2.5 / 5), as in any table.
    assert difference["ci95"] == pytest.approx([2 - 1.9629, 2 + 1.9629], abs=1e-3)


def test_seeds_are_flags_beside_those_of_a_run() -> None:
    assert auc_over_seeds.parse_seeds(["--preset", "smoke", "--seed", "3"]) == (
        range(5),
        None,
        ["--preset", "smoke", "--seed", "3"],
    )
    assert auc_over_seeds.parse_seeds(["--seeds", "10", "--fp8", "--first-seed", "5"]) == (
        range(5, 15),
        None,
        ["--fp8"],
    )


def test_two_rungs_of_a_ladder_are_the_sides() -> None:
    names = ["static", "stock", "static"]
    _, rungs, rest = auc_over_seeds.parse_seeds(["--preset", "smoke-dlrmv4", "--rungs", *names])
    assert rungs == names
    sides = auc_over_seeds.sides_of_rungs("dlrmv4", names, rest)
    assert {name: (its.pipeline.name, its.model.kernels) for name, its in sides.items()} == {
        "stock": ("torchrec", "plain"),
        "static": ("static", "fused"),
    }
    in_bf16, in_fp8 = auc_over_seeds.sides_of_rungs("dlrmv4", ["fp8", "cuda-graph", "fp8"], rest).values()
    assert in_fp8.precision == "bf16"
    assert in_bf16 == replace(in_fp8, pipeline=replace(in_fp8.pipeline, fp8=False))
    for wrong in (["static", "stock", "sttaic"], ["none", "stock", "static"], ["static", "stock", "stock"]):
        with pytest.raises(ValueError, match=f"--rungs {' '.join(wrong)}: name a ladder and two of its rungs"):
            auc_over_seeds.sides_of_rungs("dlrmv4", wrong, rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1"], "--seeds is 1: an interval needs at least 2"),
        (["--seeds", "many"], "--seeds: invalid int value: 'many'"),
        (["--rungs", "static", "stock"], "--rungs: expected 3 arguments"),
        (["--first-seed", "-1"], "--first-seed is -1: choose 0 or more"),
    ],
)
def test_bad_seeds_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auc_over_seeds.parse_seeds(arguments)


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["auc_over_seeds", "--preset", "smoke"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="start this program with torchrun"):
        auc_over_seeds.main()


def compare(monkeypatch: pytest.MonkeyPatch, folder: Path, flags: list[str]) -> None:
    """Starts a comparison of which no run can start. folder: that of the results."""
    environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    for name, value in {**environment, "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, str(value))
    place = ["--data.path", str(folder), "--results-dir", str(folder)]
    monkeypatch.setattr("sys.argv", ["auc_over_seeds", "--preset", "smoke-dlrmv4", *place, *flags])
    data = SimpleNamespace(best_auc=0.8)
    planted = SimpleNamespace(
        parts=lambda: SimpleNamespace(open_data=lambda _: data), ladders=auc_over_seeds.named("dlrmv4").ladders
    )
    monkeypatch.setattr(auc_over_seeds, "named", lambda _: planted)
    monkeypatch.setattr(auc_over_seeds, "run", None)
    try:
        auc_over_seeds.main()
    finally:
        dist.destroy_process_group()


def check_refused(monkeypatch: pytest.MonkeyPatch, folder: Path, flags: list[str], said: str) -> None:
    """A comparison ends with this error before its first run. folder: that of the results."""
    with pytest.raises(ValueError, match=said):
        compare(monkeypatch, folder, flags)


def test_a_side_that_this_machine_cannot_run_is_refused_before_the_other_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rungs = ["--rungs", "static-ends", "stock", "cuda-graph"]
    check_refused(monkeypatch, tmp_path, rungs, "--cuda-graph iteration needs a GPU")


def test_the_summary_of_earlier_seeds_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "auc_over_seeds.json").write_text("{}")
    flags = ["--first-seed", "5", "--rungs", "static", "stock", "static"]
    check_refused(monkeypatch, tmp_path, flags, f"--results-dir: {tmp_path}/auc_over_seeds.json exists, the summary of")


def test_a_disk_that_is_full_leaves_the_summary_of_the_seeds_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, before = tmp_path / "auc_over_seeds.json", []

    def auc(config: RunConfig, _: Ranks) -> float:
        if config.seed == 2:
            before[:] = [file.read_text()]
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[0]) - 10, most))
        return 0.7 + config.seed / 7

    monkeypatch.setattr(auc_over_seeds, "_auc", auc)
    with fails_after(1 << 20):  # at first
        compare(monkeypatch, tmp_path, ["--seeds", "3", "--rungs", "static", "stock", "static"])
    assert [file.read_text()] == before
    assert json.loads(before[0])["auc"].keys() == {"stock", "static"}
