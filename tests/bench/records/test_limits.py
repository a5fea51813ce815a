"""The floor that ceilings make, and limits.json."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.records.limits import (
    ALL_REDUCE,
    BATCH_COPY,
    IDS,
    LIMITS_JSON,
    LOOKUP,
    POOLED,
    Ceiling,
    Limits,
    floor,
    read_limits,
)
from dlrm_bench.bench.records.schema import Git
from tests.bench.made_records import H200, configured


def ceiling(name: str, stage: str | None, ms: float, amount: float = 1e6, unit: str = "B") -> Ceiling:
    return Ceiling(name=name, stage=stage, ms=ms, amount=amount, unit=unit)


def some_limits(**changes: Any) -> Limits:
    config = configured()
    ceilings = [
        ceiling(BATCH_COPY, "input_dist", 0.1),
        ceiling(IDS, "input_dist", 0.2),
        ceiling(LOOKUP, "embedding_forward", 0.3),
        ceiling(POOLED, "embedding_forward", 0.4),
        ceiling("GEMM: top 0 forward", "dense_forward_backward", 0.5, unit="FLOP"),
        ceiling("GEMM: top 1 forward", "dense_forward_backward", 0.5, unit="FLOP"),
        ceiling(ALL_REDUCE, "dense_forward_backward", 0.8),
        ceiling("launch: 100 kernels", None, 0.2, 100, "launches"),
    ]
    model = json.loads(json.dumps(dataclasses.asdict(config.model)))
    known: dict[str, Any] = {
        "schema": 1,
        "id": "limits",
        "created": "2026-11-21T00:00:00+00:00",
        "command": "torchrun",
        "git": Git(commit="0123abc", dirty=False),
        "machine": H200,
        "config": {"world_size": 2, "local_batch_size": config.local_batch_size, "model": model, "precision": "tf32"},
        "ceilings": ceilings,
        "floor_ms": floor(ceilings),
    }
    return Limits(**known | changes)  # type: ignore[typeddict-item]


def test_the_floor_hides_what_waits_for_nothing() -> None:
    assert some_limits()["floor_ms"] == pytest.approx(
        {
            "input_dist": 0.3,
            "embedding_forward": 0.7,
            "dense_forward_backward": 1.0,  # the all-reduce overlaps the GEMMs
            "embedding_backward": 0,
            "dense_update": 0,
            "iteration": 1.7,  # and the input dist overlaps all of it
        }
    )


def test_the_floor_is_no_lower_than_what_uses_one_resource() -> None:
    assert floor([ceiling(ALL_REDUCE, "dense_forward_backward", 9), ceiling(IDS, "input_dist", 2)])["iteration"] == 11
    assert floor([ceiling(BATCH_COPY, "input_dist", 5)])["iteration"] == 5
    assert floor([ceiling(ALL_REDUCE, "dense_forward_backward", 9)])["dense_forward_backward"] == 9


def test_reading(tmp_path: Path) -> None:
    limits, file = some_limits(), tmp_path / LIMITS_JSON
    with pytest.raises(ValueError, match=r"limits\.json cannot be read"):
        read_limits(tmp_path)
    file.write_text(json.dumps(limits))
    assert read_limits(tmp_path) == read_limits(file) == limits
    for content, message in (
        (b'{"schema"', "corrupt at line 1 column"),
        (b"\xfe", "corrupt at byte 0"),
        (b"3", r"limits\.json is damaged: expected an object, found int"),
        (b'{"schema": 2}', r"limits\.json has schema 2; this version reads 1"),
        (b'{"schema": 1}', r"limits\.json lacks id"),
        (json.dumps(limits | {"machine": {}}).encode(), r"lacks machine\.nodes, machine\.gpus"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_limits(tmp_path)
