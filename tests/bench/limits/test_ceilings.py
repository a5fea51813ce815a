"""The sizes of the work that is measured. That it can be measured, test_cli.py shows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dlrm_bench.bench.limits.ceilings import measure
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.limits import ACTIVATIONS, ADAGRAD, ATTENTION, BATCH_COPY, LARGE_PRODUCT
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.dcnv2.work import table_work
from dlrm_bench.dlrm.runtime.ranks import Ranks


def test_sizes_of_the_mlperf_model() -> None:
    config = preset("mlperf-dcnv2")
    assert config.optimizer.tables.name == "adagrad"
    in_bf16, in_fp32 = (table_work(config, 1, size) for size in (2, 4))
    assert (in_bf16.ids, in_bf16.vectors) == (214, 26 * 128)
    assert in_bf16.lookup == 214 * (4 + 512) + 26 * 128 * 2
    assert in_fp32.update == 214 * (4 + 2048) + 26 * 128 * 4
    sgd = replace(config, optimizer=replace(config.optimizer, embedding="sgd"))
    assert table_work(sgd, 1, 4).update == 214 * (4 + 1024) + 26 * 128 * 4


def test_a_model_without_counted_work_is_refused_with_those_that_have_it() -> None:
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match="--preset zoo-deepfm: the work of DeepFM is not counted: choose one of smoke, "
    ):
        next(measure(preset("zoo-deepfm"), ranks))


def amounts(ranks: Ranks, name: str) -> dict[str, tuple[float, float]]:
    """Returns amount and time of each ceiling of a preset, without samples."""
    return {ceiling["name"]: (ceiling["amount"], ceiling["ms"]) for ceiling in measure(preset(name), ranks)}


@pytest.mark.parametrize(("name", "optimizer_bytes"), [("smoke", 20), ("smoke-dlrmv4", 28)])
def test_what_is_not_measured_follows_from_the_benchmarks_work(
    run_ranks: Callable[..., list[Any]], name: str, optimizer_bytes: int
) -> None:
    """optimizer_bytes: Adagrad's and Adam's of a weight, its gradient and states."""
    (found,) = run_ranks(1, amounts, name)
    config = preset(name)
    work = named(config.benchmark).work
    assert work is not None
    pieces = {piece.name: piece for piece in work.pieces(config, 1, 0.0)}
    assert found[ADAGRAD][0] == optimizer_bytes * work.dense_weights(config)
    assert found[BATCH_COPY][0] == round(pieces["copy of the batch"].pcie)
    assert found[ACTIVATIONS][0] == pieces["activations kept for the backward"].memory
    assert (ATTENTION in found) == ("attention" in pieces)
    if ATTENTION in found:
        flop, ms = found[ATTENTION]
        assert flop == pieces["attention"].flop
        assert flop / ms == pytest.approx(found[LARGE_PRODUCT][0] / found[LARGE_PRODUCT][1])
