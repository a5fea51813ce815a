"""What keeps a pipeline's iteration out of one CUDA graph is told by its model's own modules.

tests/pipeline/five_stage/test_doctor_agrees.py has TorchRec's, beside the reasons of the five-stage pipeline.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dlrm_bench.bench.doctor.capture import of_pipeline


class SplitTableBatchedEmbeddingBagsCodegen(SimpleNamespace):
    """Stands for FBGEMM's, which is known by its name."""

    def __init__(self, optimizer: str = "exact_adagrad", precision: str = "fp32", rounds: bool = True) -> None:
        kinds: Any = {"optimizer": SimpleNamespace(value=optimizer)}
        super().__init__(weights_precision=SimpleNamespace(value=precision), stochastic_rounding=rounds, **kinds)


class ShardedModule(nn.Module):
    """Stands for a module of TorchRec's, which is known by its name."""

    validates = False
    _need_indices = False

    def __init__(self, kind: str = "table_wise", kernel: str = "fused", of: Any = None, reads: str = "") -> None:
        super().__init__()
        sharding: Any = SimpleNamespace(sharding_type=kind, compute_kernel=kernel)
        self.module_sharding_plan = {"t": sharding}
        of_group: Any = SimpleNamespace(emb_module=of or SplitTableBatchedEmbeddingBagsCodegen())
        self._lookups = [SimpleNamespace(_emb_modules=[of_group])]
        self.declared, self._input_keys, self._reads = {"a": 1}, ["a"], reads

    def reading_features(self) -> list[str]:
        return list(self._reads)


class ShardedEmbeddingBagCollection(ShardedModule):
    pass


class TrimmedEBC(ShardedEmbeddingBagCollection):
    pass


class ShardedEmbeddingCollection(ShardedModule):
    _need_indices = True


class TrimmedEC(ShardedEmbeddingCollection):
    _need_indices = False


class ShardedTower(ShardedModule):
    pass


class ShardedFeatureProcessedEmbeddingBagCollection(ShardedModule):
    def __init__(self, inside: nn.Module, processors: nn.Module) -> None:
        super().__init__()
        self._embedding_bag_collection, self._feature_processors = inside, processors


def validating() -> nn.Module:
    module = TrimmedEBC()
    module.validates = True
    return module


def given_more() -> nn.Module:
    module = TrimmedEBC()
    module._input_keys = ["a", "b"]
    return module


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


Processed = ShardedFeatureProcessedEmbeddingBagCollection
Kernel = SplitTableBatchedEmbeddingBagsCodegen


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (TrimmedEBC(), []),
        (TrimmedEBC("table_row_wise"), []),
        (ShardedEmbeddingBagCollection(), ["tables needs bags or sequences of declared sizes: TrimmedEBCSharder"]),
        (
            ShardedEmbeddingBagCollection("row_wise"),
            ["tables needs", "tables has tables that are split by rows: TrimmedEBCSharder(row_capacity=1.0)"],
        ),
        (TrimmedEC(), []),
        (TrimmedEC("row_wise", reads="a"), ["tables has sequences of tables that are split by rows"]),
        (ShardedEmbeddingCollection(), ["tables needs", "tables gives ids with its vectors"]),
        (ShardedTower(), ["tables is a ShardedTower, which no graph of an iteration takes"]),
        (TrimmedEBC(reads="ab"), ["tables reads the sizes of a, b: declare all sizes, or plan"]),
        (TrimmedEBC("row_wise", reads="a"), ["tables reads the sizes of a: declare all sizes, give bags that are"]),
        (given_more(), ["tables is given features of undeclared sizes, b"]),
        (validating(), ["tables looks at every length of every batch"]),
        (Processed(TrimmedEBC(), nn.Identity()), []),
        (Processed(TrimmedEBC("row_wise"), nn.Identity()), ["tables has feature processors and tables that are split"]),
        (Processed(TrimmedEBC(), hooked()), ["hooks of the feature processors of tables would run at captures only"]),
        (
            Processed(ShardedEmbeddingBagCollection(), nn.Identity()),
            ["tables needs bags or sequences of declared sizes: FeatureProcessedEmbeddingBagCollectionSharder(Trimmed"],
        ),
        (TrimmedEBC(kernel="fused_uvm_caching"), ["tables has tables in host memory"]),
        (TrimmedEBC(of=SimpleNamespace()), ["tables has a table that is looked up by SimpleNamespace"]),
        (TrimmedEBC(of=Kernel("adam")), []),
        (TrimmedEBC(of=Kernel("partial_row_wise_lamb")), []),
        (TrimmedEBC(of=Kernel("lars_sgd")), ["tables is updated by lars_sgd with numbers of the host"]),
        (TrimmedEBC(of=Kernel(precision="fp16")), ["tables rounds its weights at random"]),
        (TrimmedEBC(of=Kernel(precision="fp16", rounds=False)), []),
    ],
)
def test_modules(module: nn.Module, said: list[str]) -> None:
    model = nn.Module()
    model.tables = module
    found = of_pipeline(SimpleNamespace(_model=model))
    assert len(found) == len(said), found
    assert all(line.startswith(begins) for line, begins in zip(found, said, strict=True)), found


def test_hooks_of_many_modules_are_one_line() -> None:
    model = nn.ModuleDict({"tables": TrimmedEBC(), **{f"m{i}": hooked() for i in range(5)}})
    (line,) = of_pipeline(SimpleNamespace(_model=model))
    assert line == "hooks of m0, m1, m2 and 2 more would run at captures only: remove them"


def test_the_hook_of_the_doctor_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def after_step(*_: Any) -> None:
        pass

    model = nn.ModuleDict({"tables": TrimmedEBC(), "dense": nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(model["dense"].parameters())
    optimizer.register_step_post_hook(after_step)
    pipeline = SimpleNamespace(_model=model, _optimizer=optimizer)
    (line,) = of_pipeline(pipeline)
    assert line.startswith("no graph takes the dense update: hooks, or a step in the place of Adam's")
    monkeypatch.setattr(after_step, "__module__", "dlrm_bench.bench.doctor.hook")
    assert of_pipeline(pipeline) == []


def test_hooks_of_an_optimizer_around_others_are_an_obstacle() -> None:
    """As of an average of the weights that the user's own CombinedOptimizer is to update."""
    model = nn.ModuleDict({"tables": TrimmedEBC(), "dense": nn.Linear(2, 2)})
    inner = KeyedOptimizerWrapper(dict(model["dense"].named_parameters()), lambda of: torch.optim.Adam(of))
    optimizer = CombinedOptimizer([inner])
    pipeline = SimpleNamespace(_model=model, _optimizer=optimizer)
    assert of_pipeline(pipeline) == []
    vars(optimizer)["step"] = lambda: None
    (line,) = of_pipeline(pipeline)
    assert line.startswith("no graph takes the dense update: hooks, or a step in the place of CombinedOptimizer's")


def test_a_pipeline_without_a_model_has_no_obstacle() -> None:
    assert of_pipeline(None) == of_pipeline(SimpleNamespace()) == []
