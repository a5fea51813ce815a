"""Fields that are no tensors have equal forms where their values are equal, and none where that is unknown."""

from collections import deque
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_bench.pipeline.five_stage.batch_signature import form_of, signature, why_no_form, why_on_host
from dlrm_bench.pipeline.five_stage.embedding_outputs import EmbeddingOutputs


class Of:
    """Whose text is its address."""

    def __init__(self, value: int) -> None:
        self.value = value


class Task(Enum):
    CLICK = 1
    LIKE = 2

    def __repr__(self) -> str:
        return "a task"


class Name(str):
    """Whose text may hide something."""


PAIRS: list[tuple[Any, Any]] = [
    (torch.ones(2), torch.ones(3)),
    (1, 2),
    (1, 1.0),
    (1, True),
    ("a", "b"),
    (Task.CLICK, Task.LIKE),
    (torch.float32, torch.bfloat16),
    (np.zeros(2000), np.eye(1, 2000, 1000).reshape(-1)),
    (np.float32(1), np.float64(1)),
    (None, "None"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda of: type(of).__name__)
def test_other_values_are_other_forms(one: Any, other: Any) -> None:
    assert signature(one) is not None
    assert signature(one) == signature(one)
    assert signature(one) != signature(other)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
def test_tensors_that_stay_in_host_memory_are_compared_by_value(dtype: torch.dtype) -> None:
    gpu, outputs = torch.device("cuda"), EmbeddingOutputs([], [])
    for one, other in ((torch.tensor(0), torch.tensor(1)), (torch.zeros(3), torch.eye(1, 3)[0])):
        forms = [form_of([of.to(dtype)], outputs, gpu) for of in (one, one.clone(), other)]
        assert forms[0] == forms[1] != forms[2]
        assert form_of([one], outputs, torch.device("cpu")) == form_of([other], outputs, torch.device("cpu"))
    names, fields = ["batch.labels", "batch.longest"], [torch.ones(1, device="meta"), torch.tensor(3)]
    why = why_on_host(names, fields, gpu)
    assert why is not None
    assert why.startswith("batch.longest stays a tensor in host memory")
    assert why_on_host(names[:1], fields[:1], gpu) is None
    assert why_on_host(names, fields, torch.device("cpu")) is None


@pytest.mark.parametrize("value", [Of(1), Name("a"), {1}, np.array([Of(1)]), print], ids=lambda of: type(of).__name__)
def test_values_of_unknown_types_have_no_form(value: Any) -> None:
    live, outputs = deque[Any](maxlen=4), EmbeddingOutputs([], [])
    for i in range(5):
        live.append(Of(i))
        assert form_of([live[-1]], outputs, torch.device("cpu")) is None
    fields = [torch.ones(1), value]
    assert form_of(fields, outputs, torch.device("cpu")) is None
    why = why_no_form(["batch.dense", "batch.extra"], fields)
    assert why is not None
    assert why.startswith(f"batch.extra is a {type(value).__name__}, whose values a graph cannot compare")
    assert why_no_form(["batch.dense"], fields[:1]) is None
