"""Graphs on the CPU, for tests of what is around a capture."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pipeline.graphs
from pipeline.feed import BatchFeed


class Replayed:
    """Stands for a graph: replays by running."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work

    def reset(self) -> None:
        """There is nothing to free."""


def capture_on_cpu(fails: Callable[[], bool] = lambda: False) -> None:
    """In this process. Capturing runs nothing, or, where `fails`, runs until something raises, and fetches no batch:
    a capture that fails runs nothing, and fetches count."""

    def record(work: Callable[[], None], watch: Any, *_: Any) -> Replayed:
        if fails():
            with watch, patch.object(BatchFeed, "fetch", lambda *_: None):
                work()
        return Replayed(work)

    pipeline.graphs.require_gpu = lambda _: None  # type: ignore[assignment]
    pipeline.graphs.record = record  # type: ignore[assignment]
