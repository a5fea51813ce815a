"""What the static pipeline refuses of DLRMv4, by the flag."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.config import PIPELINES
from dlrm_bench.bench.presets import preset


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--presort-ids", {"presort_ids": True}),
        ("--presort-ids", {"presort_ids": True, "peer_memory": True}),
    ],
)
def test_options_of_pooled_tables_are_refused(flag: str, options: dict[str, bool]) -> None:
    config = preset("smoke-dlrmv4")
    with pytest.raises(ValueError, match=flag):
        replace(config, pipeline=PIPELINES["static"](**options))


@pytest.mark.parametrize(
    ("flag", "changes", "options"),
    [
        ("--model.embedding-dim", {"embedding_dim": 48}, {}),
        ("--model.network", {"network": "reference", "reference": Path(), "last_layer": "all"}, {}),
        ("--model.recompute-layers", {"recompute_layers": True}, {"cuda_graph": "try"}),
    ],
)
def test_models_are_refused(flag: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    config = preset("smoke-dlrmv4")
    with pytest.raises(ValueError, match=flag):
        replace(config, model=replace(config.model, **changes), pipeline=PIPELINES["static"](**options))


def test_recompute_by_fused_kernels_goes_with_graphs() -> None:
    config = preset("smoke-dlrmv4")
    model = replace(config.model, recompute_layers=True, kernels="fused")
    replace(config, model=model, pipeline=PIPELINES["static"](cuda_graph="iteration"))


@pytest.mark.parametrize(
    ("kernels", "precision", "message"),
    [
        ("plain", "bf16", "--fp8 needs --model.kernels fused, whose norms write e4m3, not plain"),
        ("fused", "fp32", "--fp8 needs --precision bf16, not fp32"),
        ("fused", "tf32", "--fp8 needs --precision bf16, not tf32"),
    ],
)
def test_eight_bits_need_fused_kernels_and_bf16(kernels: str, precision: str, message: str) -> None:
    config = preset("smoke-dlrmv4")
    fused = replace(config, model=replace(config.model, kernels="fused"), precision="bf16")
    for graph in ("none", "iteration"):
        replace(fused, pipeline=PIPELINES["static"](fp8=True, cuda_graph=graph))
    changed = {"model": replace(config.model, kernels=kernels), "precision": precision}
    with pytest.raises(ValueError, match=message):
        replace(config, **changed, pipeline=PIPELINES["static"](fp8=True))


def test_graphs_go_with_a_rate_that_changes() -> None:
    config = preset("mlperf-dlrmv4")
    assert config.optimizer.rate(1) is not None
    replace(config, pipeline=PIPELINES["static"](cuda_graph="iteration", overlap=True))
