"""DeviceRecMetrics beside RecMetricModule: the same values under the same keys, on one rank and several."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.metrics.metric_module import RecMetricModule
from torchrec.metrics.metrics_config import RecComputeMode, RecMetricEnum, RecTaskInfo, ThroughputDef
from torchrec.metrics.rec_metric import MAX_BUFFER_COUNT, RecMetricException

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics
from tests.kernels.devices import DEVICE
from tests.pipeline.device_metrics.made_metrics import (
    WINDOWS,
    assert_same_values,
    batch,
    both,
    config,
    copied,
    made,
    tasks,
)

SIZES = (16, 1, 7, 16, 16, 3, 40, 16, *((50, 60) if DEVICE.type == "cuda" else (95, 200)), 16, 16, 2)
"""Batches that fill windows and roll them over; on the CPU they exceed and so empty some, too. An emptied window holds
what rounding left, which on a GPU has another order: test_triton_update compares that."""
FUSED = RecComputeMode.FUSED_TASKS_COMPUTATION
OPTIONS: dict[RecMetricEnum, dict[str, Any]] = {
    RecMetricEnum.NE: {"include_logloss": True},
    RecMetricEnum.MSE: {"include_r_squared": True},
    RecMetricEnum.ACCURACY: {"threshold": 0.3},
    RecMetricEnum.AUC: {"apply_bin": True},
}


def updated(metrics: list[RecMetricModule], of: list[RecTaskInfo], sizes: tuple[int, ...], seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        model_out = batch(of, size, generator)
        for module in metrics:
            module.update(copied(model_out))


@pytest.mark.parametrize(
    "options",
    [{}, {"arguments": OPTIONS}, {"rec_compute_mode": FUSED}, {"should_validate_update": True}],
    ids=["plain", "options", "fused", "validated"],
)
def test_values_are_torchrecs_after_every_batch(options: dict[str, Any]) -> None:
    of = tasks(3)
    theirs, ours = both(config(of, **options))
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        model_out = batch(of, size, generator)
        theirs.update(copied(model_out))
        ours.update(model_out)
        assert_same_values(ours.compute(), theirs.compute())
        assert_same_values(ours.local_compute(), theirs.local_compute())


def test_values_before_the_first_batch_are_torchrecs() -> None:
    for options in ({}, {"should_validate_update": True}):
        theirs, ours = both(config(tasks(2), **options))
        assert_same_values(ours.compute(), theirs.compute())


@pytest.mark.parametrize("size", [1, 10, 16])
def test_a_window_may_be_full_to_the_last_sample(size: int) -> None:
    of = tasks(1)
    theirs, ours = both(config(of, dict.fromkeys(WINDOWS, 4 * size)), batch_size=size)
    generator = torch.Generator().manual_seed(15)
    for _ in range(9):
        model_out = batch(of, size, generator)
        theirs.update(copied(model_out))
        ours.update(model_out)
        assert_same_values(ours.compute(), theirs.compute())


def test_a_window_holds_no_more_batches_than_torchrecs() -> None:
    of = tasks(1)
    theirs, ours = both(config(of, dict.fromkeys(WINDOWS, 10**6)))
    updated([theirs, ours], of, (2,) * (MAX_BUFFER_COUNT + 60))
    assert_same_values(ours.compute(), theirs.compute())


def test_weights_of_zero_and_batches_without_weight() -> None:
    of = tasks(2)
    for options in ({}, {"should_validate_update": True}):
        theirs, ours = both(config(of, **options))
        generator = torch.Generator().manual_seed(2)
        for turn in range(12):
            model_out = batch(of, 30, generator)
            # Of eighths, whose sums are exact in any order: what leaves a window leaves nothing behind.
            for task in of:
                model_out[task.weight_name] = (model_out[task.weight_name] * 8).round() / 8
                model_out[task.prediction_name] = (model_out[task.prediction_name] * 8).round().clamp(1, 7) / 8
            model_out[of[turn % 2].weight_name].zero_()
            if turn > 7:
                model_out[of[0].weight_name].zero_()
            theirs.update(copied(model_out))
            ours.update(model_out)
            # A window without any weight has an NE of what rounding left over zero.
            noise = "ne-task0|window_ne" if turn > 9 else ""
            mine, expected = (
                {key: value for key, value in module.compute().items() if key != noise} for module in (ours, theirs)
            )
            assert_same_values(mine, expected)


def test_tasks_may_share_outputs_and_lack_samples() -> None:
    """Tasks whose samples are a part of the batch do so, under TorchRec's default mode."""
    of = [RecTaskInfo("a", "click", "p_a", "w"), RecTaskInfo("b", "click", "p_b", "w"), RecTaskInfo("c", "l", "p", "v")]
    theirs, ours = both(config(of))
    generator = torch.Generator().manual_seed(3)
    for turn in range(10):
        model_out = batch(of[:2], 20, generator) | batch(of[2:], (0, 5, 33)[turn % 3], generator)
        theirs.update(copied(model_out))
        ours.update(model_out)
    assert_same_values(ours.compute(), theirs.compute())


def test_metrics_may_have_tasks_of_their_own() -> None:
    of = tasks(3)
    some = config(of)
    some.rec_metrics[RecMetricEnum.AUC].rec_tasks = of[1:]
    some.rec_metrics[RecMetricEnum.NE].rec_tasks = [of[2], of[0]]
    theirs, ours = both(some)
    updated([theirs, ours], of, SIZES)
    assert_same_values(ours.compute(), theirs.compute())


def test_equal_predictions_rank_as_torchrec_ranks_them() -> None:
    of = tasks(1)
    theirs, ours = both(config(of, {RecMetricEnum.AUC: 3000}))
    generator = torch.Generator().manual_seed(4)
    for size in (1000, 1, 700, 1500, 900):
        model_out = batch(of, size, generator)
        model_out["prediction0"] = (model_out["prediction0"] * 20).round() / 20
        theirs.update(copied(model_out))
        ours.update(model_out)
        assert_same_values(ours.compute(), theirs.compute())


def test_float32_batches_are_summed_in_float64() -> None:
    """TorchRec sums float32 in float32: ours is what it has for the same numbers as float64, and near what it has."""
    of = tasks(2)
    exact, ours = both(config(of))
    near = made(RecMetricModule, config(of))
    generator = torch.Generator().manual_seed(5)
    for size in SIZES:
        model_out = batch(of, size, generator, torch.float32)
        near.update(copied(model_out))
        exact.update({name: tensor.double() for name, tensor in model_out.items()})
        ours.update(model_out)
    assert_same_values(ours.compute(), exact.compute())
    mine = ours.compute()
    for key, value in near.compute().items():
        torch.testing.assert_close(mine[key], value.cpu(), rtol=1e-5, atol=1e-6)


def test_a_compute_has_the_values_of_its_moment() -> None:
    of = tasks(2)
    theirs, ours = both(config(of))
    updated([theirs, ours], of, SIZES)
    expected = theirs.compute()
    pending = ours.compute_async()
    updated([ours], of, SIZES, seed=7)
    assert pending.done()
    assert_same_values(pending.result(), expected)
    assert pending.result() is pending.result()


def test_reset_forgets_in_the_same_memory() -> None:
    of = tasks(2)
    theirs, ours = both(config(of))
    addresses = [tensor.data_ptr() for tensor in ours.device_state.buffers()]
    updated([theirs, ours], of, SIZES)
    for module in (theirs, ours):
        module.reset()
    assert_same_values(ours.compute(), theirs.compute())
    updated([theirs, ours], of, SIZES, seed=8)
    assert_same_values(ours.compute(), theirs.compute())
    assert [tensor.data_ptr() for tensor in ours.device_state.buffers()] == addresses


@pytest.mark.parametrize("options", [{}, {"rec_compute_mode": FUSED}, {"should_validate_update": True}])
def test_resumed_metrics_go_on_to_the_bit(options: dict[str, Any]) -> None:
    of = tasks(2)
    kept, resumed = (made(DeviceRecMetrics, config(of, **options)) for _ in range(2))
    updated([kept], of, SIZES)
    addresses = [tensor.data_ptr() for tensor in resumed.device_state.buffers()]
    resumed.load_state_dict(copy.deepcopy(kept.state_dict()))
    assert [tensor.data_ptr() for tensor in resumed.device_state.buffers()] == addresses
    updated([kept, resumed], of, SIZES, seed=9)
    assert_same_values(resumed.compute(), kept.compute(), 0.0)


def test_a_copy_has_sums_of_its_own() -> None:
    of = tasks(2)
    metrics, expected = (made(DeviceRecMetrics, config(of)) for _ in range(2))
    updated([metrics, expected], of, SIZES[:3])
    values = metrics.compute()
    copied = copy.deepcopy(metrics)
    updated([copied, expected], of, SIZES[:3], seed=9)  # forms that the original knows
    assert_same_values(metrics.compute(), values, 0.0)
    assert_same_values(copied.compute(), expected.compute(), 0.0)
    copied.load_state_dict(metrics.state_dict())
    assert_same_values(copied.compute(), values, 0.0)


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (1, 3)])
@pytest.mark.parametrize("sizes", [(5, 6), SIZES, (45, 90)])
def test_a_run_goes_on_with_other_windows_of_a_rank(before: int, now: int, sizes: tuple[int, ...]) -> None:
    """A rank's window depends on the number of ranks: AUC's last samples go on, as many as both windows hold."""
    of = tasks(2)
    saved, kept = (made(DeviceRecMetrics, config(of), world_size=ranks) for ranks in (before, now))
    updated([saved, kept], of, sizes)
    resumed = made(DeviceRecMetrics, config(of), world_size=now)
    state = saved.state_dict()
    resumed.load_state_dict(copy.deepcopy(state))
    assert all(torch.equal(saved.state_dict()[key], tensor) for key, tensor in state.items())
    assert torch.equal(
        resumed.device_state.seen.clamp(max=90), kept.device_state.seen.clamp(max=90 // max(before, now))
    )
    updated([kept, resumed], of, (10,) * 14, seed=9)  # fills the windows of all sums
    assert_same_values(resumed.compute(), kept.compute(), 1e-12)


def test_checkpoints_of_rec_metric_module_are_taken_and_given(caplog: pytest.LogCaptureFixture) -> None:
    """Lifetime values go on in both; windows start empty, as TorchRec saves none."""
    of = tasks(2)
    theirs, ours = both(config(of))
    updated([theirs], of, SIZES)
    updated([ours], of, SIZES[:3], seed=10)  # is forgotten
    with caplog.at_level(logging.WARNING):
        ours.load_state_dict(theirs.state_dict())
    assert "windows and AUC start empty" in caplog.text
    fresh = made(RecMetricModule, config(of))
    fresh.load_state_dict(theirs.state_dict())
    assert_same_values(ours.compute(), fresh.compute())
    updated([ours, fresh], of, SIZES, seed=11)
    assert_same_values(ours.compute(), fresh.compute())
    again = made(RecMetricModule, config(of))
    unknown = again.load_state_dict(ours.state_dict(), strict=False)
    assert not unknown.missing_keys
    assert all(key.startswith("device_state.") for key in unknown.unexpected_keys)
    lifetimes = {key: value for key, value in again.compute().items() if "lifetime" in key}
    assert lifetimes
    assert_same_values({key: value for key, value in ours.compute().items() if "lifetime" in key}, lifetimes)


def test_a_checkpoint_of_other_tasks_is_refused_by_name() -> None:
    saved = made(DeviceRecMetrics, config(tasks(3), rec_compute_mode=FUSED)).state_dict()
    with pytest.raises((RuntimeError, ValueError), match=r"size mismatch for device_state.window|cross_entropy_sum"):
        made(DeviceRecMetrics, config(tasks(2), rec_compute_mode=FUSED)).load_state_dict(saved)


def test_assigned_checkpoints_are_refused() -> None:
    metrics = made(DeviceRecMetrics, config(tasks(1)))
    with pytest.raises(ValueError, match="omit assign"):
        metrics.load_state_dict(metrics.state_dict(), assign=True)


def test_throughput_and_states_are_torchrecs() -> None:
    class States:
        def get_metrics(self) -> dict[str, Any]:
            return {"learning_rate": 0.5}

    of = config(tasks(1), throughput_metric=ThroughputDef(warmup_steps=2, window_size=10))
    theirs, ours = both(of)
    for module in (theirs, ours):
        module.state_metrics = {"optimizers-optimizers": States()}
    updated([theirs, ours], tasks(1), (16,) * 5)
    values, expected = ours.compute(), theirs.compute()
    assert set(values) == set(expected)
    assert values["throughput-throughput|total_examples"] == 5 * 16
    assert values["optimizers-optimizers|learning_rate"] == 0.5
    assert ours.trained_batches == 5
    assert ours.compute_count == 1


def test_sums_stay_float64() -> None:
    metrics = made(DeviceRecMetrics, config(tasks(1)))
    with pytest.raises(ValueError, match="float64"):
        metrics.half()


def test_what_has_no_place_here_is_refused() -> None:
    metrics = made(DeviceRecMetrics, config(tasks(1)))
    with pytest.raises(RecMetricException, match="state_dict"):
        metrics.get_pre_compute_states()
    with pytest.raises(RecMetricException, match="state_dict"):
        metrics.load_pre_compute_states({})


@pytest.mark.gpu
def test_replays_go_on_where_the_last_one_ended() -> None:
    of = tasks(20)
    theirs, ours = both(config(of, dict.fromkeys(WINDOWS, 1500), rec_compute_mode=FUSED), batch_size=512)
    generator = torch.Generator().manual_seed(12)
    model_out = batch(of, 512, generator)
    ours.update(model_out)
    ours.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.update(model_out)
    pending, expected = None, {}
    for turn in range(60):
        for name, tensor in batch(of, 512, generator).items():
            model_out[name].copy_(tensor)
        graph.replay()
        theirs.update(copied(model_out))
        if turn == 30:
            pending, expected = ours.compute_async(), theirs.compute()
    assert pending is not None
    assert_same_values(pending.result(), expected)
    assert_same_values(ours.compute(), theirs.compute())


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    of = tasks(3)
    metrics = made(DeviceRecMetrics, config(of, should_validate_update=True, throughput_metric=ThroughputDef()))
    model_out = batch(of, 64, torch.Generator().manual_seed(13))
    metrics.update(model_out)
    metrics.compute()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            metrics.update(model_out)
        pending = metrics.compute_async()
        pending.done()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.result()["throughput-throughput|total_examples"] == 4 * 16


@pytest.mark.gpu
def test_what_a_capture_cannot_hold_is_refused_by_name() -> None:
    of = tasks(1)
    model_out = batch(of, 64, torch.Generator().manual_seed(14))
    with_throughput = made(DeviceRecMetrics, config(of, throughput_metric=ThroughputDef()))
    metrics = made(DeviceRecMetrics, config(of))
    with_throughput.update(model_out)
    for call, message in (
        (lambda: metrics.update(model_out), "update once so that the kernel exists"),
        (lambda: with_throughput.update(model_out), "throughput is measured on the host"),
        (metrics.compute_async, "compute cannot be captured"),
    ):
        with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    metrics.update(model_out)


def on_ranks(ranks: Ranks, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """What both kinds compute after batches of other sizes on each rank, and ours again from a checkpoint."""
    of = tasks(2)
    made_of = {"rank": ranks.rank, "world_size": ranks.world_size, "device": ranks.device}
    theirs, ours = both(config(of, **options), **made_of)
    generator = torch.Generator().manual_seed(ranks.rank)
    for turn, size in enumerate(SIZES):
        if ranks.rank == 2 and turn > 3:
            break  # the windows of this rank stay half empty
        model_out = batch(of, size + ranks.rank, generator, device=ranks.device)
        theirs.update(copied(model_out))
        ours.update(model_out)
        if turn == 1:
            assert_same_values(ours.compute(), theirs.compute())
    resumed = made(DeviceRecMetrics, config(of, **options), **made_of)
    resumed.load_state_dict(ours.state_dict())
    pending = resumed.compute_async()
    expected, values = theirs.compute(), ours.compute()
    assert_same_values(pending.result(), values, 0.0)
    assert_same_values(ours.local_compute(), theirs.local_compute())
    for module in (theirs, ours):
        module.sync()
    with pytest.raises(RecMetricException, match="unsync"):
        ours.update(model_out)
    synced, as_theirs = ours.state_dict(), theirs.state_dict()
    for key, tensor in as_theirs.items():
        torch.testing.assert_close(synced[key], tensor, rtol=1e-12, atol=0.0)
    for module in (theirs, ours):
        module.unsync()
    assert_same_values(ours.compute(), theirs.compute())
    return dict(values), dict(expected), {}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"compute_on_all_ranks": True, "should_validate_update": True}])
def test_values_over_ranks_are_torchrecs(run_ranks: Any, options: dict[str, Any]) -> None:
    results = run_ranks(3, on_ranks, options)
    for rank, (values, expected, _) in enumerate(results):
        assert_same_values(values, expected)
        assert bool(values) == (rank == 0 or "compute_on_all_ranks" in options)
