"""What no graph of an iteration takes is refused by name before the first batch, with what to do about it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import dlrm_bench.pipeline.five_stage.iteration_obstacles
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.iteration_obstacles import _of_kernel, why_no_iteration, why_no_iteration_of
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from dlrm_bench.pipeline.five_stage.table_steps import COUNTING
from dlrm_bench.pipeline.five_stage.trimmed.ec_sharder import TrimmedECSharder
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.five_stage.any_models import (
    LONGEST,
    PLANS,
    RW,
    TW,
    Everything,
    Sequence,
    TwoTower,
    build,
    sequences,
)

BAGS = dict.fromkeys(("u0", "u1", "i0", "i1", "w0", "w1"), 3)
LENGTHS = dict.fromkeys(("history", "context"), LONGEST)


def sharders(**of_sequences: Any) -> dict[type, Any]:
    bags = TrimmedEBCSharder(BAGS)
    return {
        EmbeddingBagCollection: bags,
        FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollectionSharder(bags),
        EmbeddingCollection: TrimmedECSharder(**of_sequences),
    }


def unprocessed() -> Everything:
    return Everything(processed=False)


class Processed(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.items = sequences()


def hooked() -> Processed:
    model = Processed()
    model.processed._feature_processors.register_forward_hook(lambda *_: None)
    return model


SEVERAL = [dict.fromkeys(LENGTHS, count) for count in (20, 30)]
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "nothing": (Sequence, {"sequence_lengths": LENGTHS}),
    "nothing, of several sizes": (Sequence, {"batch_ids": SEVERAL}),
    "items gives ids with its vectors": (unprocessed, {"sequence_lengths": LENGTHS}),
    "nothing, with processors": (Processed, {"sequence_lengths": LENGTHS}),
    "hooks of the feature processors of processed": (hooked, {"sequence_lengths": LENGTHS}),
    "the input dist of context, history of items": (
        Sequence,
        {"sequence_lengths": {"history": 6}},
    ),
}


def whys(ranks: Ranks) -> dict[str, str | None]:
    found = {}
    for name, (model, of_sequences) in CASES.items():
        sharded, _ = build(ranks, model, PLANS["TW"], sharders=sharders(**of_sequences))
        found[name] = why_no_iteration(sharded_modules(sharded))
    by_rows, _ = build(ranks, Processed, processed_by_rows, sharders=sharders(sequence_lengths=LENGTHS))
    found["processed has feature processors and tables split by rows"] = why_no_iteration(
        [one for one in sharded_modules(by_rows) if one.has_processors]
    )
    validating: dict[type, Any] = {EmbeddingBagCollection: TrimmedEBCSharder(BAGS, validate=True)}
    validated, _ = build(ranks, TwoTower, PLANS["TW"], sharders=validating)
    found["user.tables looks at every length"] = why_no_iteration(sharded_modules(validated))
    return found


def processed_by_rows(index: int, sequence: bool) -> str:
    """The last table by rows."""
    return RW if index == 6 else TW


def test_models_that_no_graph_takes_are_named(run_ranks: Callable[..., Any]) -> None:
    (found,) = run_ranks(1, whys)
    assert found.pop("nothing") is None
    assert found.pop("nothing, of several sizes") is None
    assert found.pop("nothing, with processors") is None
    for name, why in found.items():
        assert why is not None
        assert name in why


def kernel(**changed: Any) -> Any:
    """Stands for FBGEMM's."""
    made = SplitTableBatchedEmbeddingBagsCodegen.__new__(SplitTableBatchedEmbeddingBagsCodegen)
    nothing = torch.zeros(0)
    vars(made).update(
        lxu_cache_weights=nothing, weights_uvm=nothing, optimizer=EmbOptimType.EXACT_ADAGRAD,
        stochastic_rounding=True, weights_precision=SparseType.FP32,
    )  # fmt: skip
    vars(made).update(changed)
    return made


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (kernel(), None),
        (SimpleNamespace(), "looked up by SimpleNamespace"),
        (kernel(lxu_cache_weights=torch.zeros(4)), "lies in host memory"),
        (kernel(weights_uvm=torch.zeros(4)), "lies in host memory"),
        (kernel(optimizer=EmbOptimType.LARS_SGD), "the fused update of tables, lars_sgd, is given numbers"),
        (kernel(_used_rowwise_adagrad_with_counter=True), "is given numbers by the host that no graph follows"),
        (kernel(weights_precision=SparseType.FP16), "rounds its weights at random"),
        (kernel(weights_precision=SparseType.FP16, stochastic_rounding=False), None),
    ],
)
def test_tables_that_no_graph_takes_are_named(of: Any, why: str | None) -> None:
    said = _of_kernel("tables", of)
    assert said is None if why is None else why in (said or "")


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("optimizer", COUNTING)
def test_steps_of_the_host_need_graphs_that_can_be_changed(
    optimizer: EmbOptimType, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dlrm_bench.pipeline.five_stage.iteration_obstacles, "keeps_graphs", lambda: keeps)
    said = _of_kernel("tables", kernel(optimizer=optimizer))
    assert said is None if keeps else f"tables, {optimizer.value}, is given its step by the host" in (said or "")


def test_inputs_that_no_graph_takes_are_named() -> None:
    one: Any = SimpleNamespace(name="tables", collection=SimpleNamespace(declared={"a": 1}))
    lengths = torch.ones(6, dtype=torch.int32)
    other = KeyedJaggedTensor(["a", "b"], torch.zeros(6), lengths=lengths, stride=3)
    varying = KeyedJaggedTensor(["a", "b"], torch.zeros(6), lengths=lengths, stride_per_key_per_rank=[[2], [4]])
    assert "batch sizes differ between the features of tables" in (why_no_iteration_of([one], [varying]) or "")
    assert "has features of undeclared sizes, b" in (why_no_iteration_of([one], [other]) or "")
