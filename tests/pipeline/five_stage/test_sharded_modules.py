"""The sharded modules of a model are found or refused by name, and what the batch gives them without a trace."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.batch_fields import follow
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.sharded_modules import Sharded, find_inputs, sharded_modules
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.pipeline.five_stage.any_models import RW, TW, Everything, TwoTower, batches, build

CPU = torch.device("cpu")


class Collection(nn.Module):
    """As much of a sharded collection as the search looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3))
        self._embedding_names, self._embedding_dims, self._embedding_shardings = ["a"], [4], []

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return features.lengths().float()


class Model(nn.Module):
    """Calls its collections with what `calls` gives them, after work that leaves traces."""

    def __init__(self, *calls: tuple[int, Callable[[Any], Any]]) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.collections = nn.ModuleList([Collection(), Collection()])
        self._calls = calls

    def forward(self, batch: Any) -> list[Any]:
        self.dropout(self.norm(torch.rand(4, 2)))
        try:
            return [self.collections[i](get(batch)) for i, get in self._calls]
        except Exception:  # what the search raises must come through
            return []

    @property
    def sharded(self) -> list[Sharded]:
        return [Sharded(f"collections.{i}", module) for i, module in enumerate(self.collections)]


def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


def first(batch: Any) -> Any:
    return batch[0]


def second(batch: Any) -> Any:
    return batch[1]


def test_finds_what_each_module_is_given_in_the_order_of_the_calls():
    model = Model((1, first), (0, second))
    batch = (kjt(), kjt())
    paths = find_inputs(model, model.sharded, batch, CPU)
    assert [(one.name, follow(batch, path)) for one, path in paths.items()] == [
        ("collections.1", batch[0]),
        ("collections.0", batch[1]),
    ]


def test_one_kjt_may_be_for_all():
    model = Model((0, first), (1, first))
    assert list(find_inputs(model, model.sharded, (kjt(),), CPU).values()) == [(("item", 0),)] * 2


def test_a_module_that_is_not_called_is_left_out():
    model = Model((1, first))
    assert [one.name for one in find_inputs(model, model.sharded, (kjt(),), CPU)] == ["collections.1"]


def computed(batch: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a"], values=batch[0].values() + 1, lengths=batch[0].lengths())


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([(0, computed)], "passes collections.0 a KeyedJaggedTensor that is not a field of the"),
        ([(0, lambda batch: batch[0].values())], "passes collections.0 a Tensor that is not a field"),
        ([(0, first), (0, first)], "calls collections.0 twice with one batch"),
        ([], "does not call collections.0, collections.1"),
    ],
)
def test_what_cannot_be_looked_up_before_is_refused(calls, why):
    model = Model(*calls)
    with pytest.raises(ValueError, match=why):
        find_inputs(model, model.sharded, (kjt(),), CPU)


@pytest.mark.parametrize("calls", [[(0, first), (1, first)], [(0, first)]])
def test_the_search_leaves_no_trace(calls):
    model = Model(*calls)
    torch.manual_seed(3)
    random, buffers = torch.get_rng_state(), {name: value.clone() for name, value in model.named_buffers()}
    find_inputs(model, model.sharded, (kjt(),), CPU)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert not any("forward" in vars(module) for module in model.collections)
    model((kjt(),))  # which would be seen
    assert not torch.equal(model.norm.running_mean, buffers["norm.running_mean"])


def test_the_search_leaves_no_trace_of_a_model_that_fails():
    def fail(batch: Any) -> Any:
        raise BaseException("of the model")  # an Exception it catches

    model = Model((0, fail))
    random, before = torch.get_rng_state(), model.norm.running_mean.clone()
    with pytest.raises(BaseException, match="of the model"):
        find_inputs(model, model.sharded, (kjt(),), CPU)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.norm.running_mean, before)


def test_models_without_sharded_modules_are_refused():
    with pytest.raises(ValueError, match="this one has no sharded module"):
        sharded_modules(SimpleNamespace(module=nn.Linear(1, 1)))  # type: ignore[arg-type]


def by_rows(ranks: Ranks) -> list[str]:
    """Builds a model whose processed table, the seventh of all, is split by rows."""
    said = []
    for rows_to_all in (False, True):
        bags = TrimmedEBCSharder({"u0": 3, "u1": 3, "i0": 3, "i1": 3}, rows_to_all=rows_to_all)
        sharders = {FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollectionSharder(bags)}
        model, _ = build(ranks, Everything, lambda index, _: RW if index == 6 else TW, sharders=sharders)
        try:
            said.append(f"{len(sharded_modules(model))} modules")
        except ValueError as error:
            said.append(str(error))
    return said


def test_processors_of_rows_that_go_to_all_ranks_are_refused(run_ranks: Callable[..., Any]) -> None:
    for taken, refused in run_ranks(2, by_rows):
        assert taken == "4 modules"
        assert refused.startswith("processed has feature processors")
        assert "leave TrimmedEBCSharder's rows_to_all out" in refused


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def half(ranks: Ranks) -> None:
    """The model computes in the type of its tables, from the search on."""

    class Half(TwoTower):
        def __init__(self) -> None:
            super().__init__()
            self.user.mlp.half()
            self.item.mlp.half()

        def logits(self, batch: Any) -> Tensor:
            return super().logits(batch).float()

    sharder = EmbeddingBagCollectionSharder(fused_params={"output_dtype": SparseType.FP16})
    losses = []
    for kind in (TrainPipelineSparseDist, FiveStagePipeline):
        model, optimizer = build(ranks, Half, lambda i, sequence: TW, sgd, sharders={EmbeddingBagCollection: sharder})
        pipeline, data = kind(model, optimizer, ranks.device), iter(batches(ranks, 4))
        losses.append([pipeline.progress(data)[0].item() for _ in range(4)])
    assert losses[0] == losses[1]


def test_the_search_has_vectors_of_the_tables_output_type(run_ranks):
    run_ranks(1, half)
