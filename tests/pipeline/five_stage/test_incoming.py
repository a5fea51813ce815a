"""Batches in flight: the user's stay as they are, and memory of those dropped waits for input dists."""

import signal
from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torchrec import KeyedJaggedTensor

import dlrm_bench.pipeline.five_stage.pipeline
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.feature_processors import with_weights
from dlrm_bench.pipeline.five_stage.in_flight import InFlight
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.pipeline.five_stage.any_models import PLANS, AnyBatch, TwoTower, batches, build
from tests.pipeline.five_stage.logical_streams import LogicalStreams, Order


def moved(batch: AnyBatch, **_: Any) -> AnyBatch:
    """A copy, as on a device."""
    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return AnyBatch(
        **{n: with_weights(p, p.weights_or_none()) if isinstance(p, KeyedJaggedTensor) else p for n, p in parts.items()}
    )


def counts(ranks: Ranks) -> None:
    signal.alarm(600)
    with patch.object(AnyBatch, "to", moved):
        data = batches(ranks, 4)
        pipeline = FiveStagePipeline(*build(ranks, TwoTower, PLANS["RW"]), ranks.device)
        source: Iterator[Any] = iter(data)
        for _ in range(2):
            pipeline.progress(source)
        last = pipeline._incoming.in_flight[-1]
        assert last.features[0].length_per_key_or_none() is not None
        assert data[3].bags.length_per_key_or_none() is None


def test_lengths_per_key_are_counted_on_the_host_beside_the_users_kjt(run_ranks):
    run_ranks(2, counts)


def as_dict(ranks: Ranks) -> None:
    (batch,) = batches(ranks, 1)
    pipeline = FiveStagePipeline(*build(ranks, TwoTower, PLANS["TW"]), ranks.device)
    with pytest.raises(ValueError, match=r"a batch is a dict, which has no method to\(.*Pipelineable"):
        pipeline.progress(iter([vars(batch)]))


def test_a_batch_that_cannot_be_copied_to_a_device_is_named(run_ranks):
    run_ranks(2, as_dict)


def closes(ranks: Ranks) -> None:
    """In the middle of an epoch, with an input dist under way."""
    signal.alarm(600)
    order = Order()
    streams: Any = lambda device, records: LogicalStreams(order)  # noqa: E731
    waits: list[tuple[str, Any]] = []
    with patch.object(dlrm_bench.pipeline.five_stage.pipeline, "StageStreams", streams):
        pipeline = FiveStagePipeline(*build(ranks, TwoTower, PLANS["TW"]), ranks.device, FiveStageOptions())
        pipeline.progress(iter(batches(ranks, 4)))
        last = torch.zeros(0), pipeline._streams.mark("input_dist")
        hold = pipeline._streams.hold
        with patch.object(
            pipeline._streams, "hold", lambda name, after: (waits.append((name, after)), hold(name, after))
        ):
            pipeline.close()
    assert waits[0][0] == "copy"
    assert waits[0][1] == last[1]


def test_a_pipeline_that_is_closed_waits_with_the_memory_of_its_batches(run_ranks):
    run_ranks(1, closes)


def test_the_callers_stream_waits_once_for_each_copy():
    """As iterations follow one another there, the second wait would tell it nothing."""
    streams, (first, second) = Mock(), [InFlight((), Mock(), Mock(), []) for _ in range(2)]
    for of in (first, second, second, first):
        of.await_copy(streams)
    assert [call.args for call in streams.wait.call_args_list] == [(first.copied,), (second.copied,)]
