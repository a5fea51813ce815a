"""Profilers know the stages by their names."""

from threading import Thread

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from dlrm_bench.pipeline.five_stage.streams import stage

CPU = torch.device("cpu")


def work(name: str) -> None:
    with stage(name, CPU):
        torch.zeros(1).add_(1)


def test_a_profiler_sees_stages_of_all_threads():
    work("before")
    thread = Thread(target=work, args=("of another thread",))
    with profile(
        activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
    ) as seen:
        work("within")
        thread.start()
        thread.join()
    work("after")
    names = [event.name for event in seen.events()]
    assert [name for name in names if name in ("before", "within", "of another thread", "after")] == [
        "within",
        "of another thread",
    ]


def test_nothing_is_recorded_while_nobody_listens(monkeypatch):
    def record(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("dlrm_bench.pipeline.five_stage.streams.record_function", record)
    work("unheard")
