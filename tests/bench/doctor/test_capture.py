"""What keeps a pipeline's iteration out of one CUDA graph is told by its model's own modules."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dlrm_bench.bench.doctor.capture import of_pipeline


class _Sharded(nn.Module):
    """Stands for a module of TorchRec's, which is known by its name."""

    def __init__(self, kind: str = "table_wise", kernel: str = "fused", optimizer: str = "exact_adagrad") -> None:
        super().__init__()
        sharding: Any = SimpleNamespace(sharding_type=kind, compute_kernel=kernel)
        self.module_sharding_plan = {"t": sharding}
        of_group: Any = SimpleNamespace(emb_module=SimpleNamespace(optimizer=SimpleNamespace(value=optimizer)))
        self._lookups = [SimpleNamespace(_emb_modules=[of_group])]


class ShardedEmbeddingBagCollection(_Sharded):
    pass


class TrimmedEBC(ShardedEmbeddingBagCollection):
    _row_capacity: float | None = None


class ByCapacity(TrimmedEBC):
    _row_capacity = 1.0


class ShardedEmbeddingCollection(_Sharded):
    _need_indices = True


class TrimmedEC(ShardedEmbeddingCollection):
    _need_indices = False


class ShardedTower(_Sharded):
    pass


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (TrimmedEBC(), []),
        (ByCapacity("table_row_wise"), []),
        (ShardedEmbeddingBagCollection(), ["tables needs bags or sequences of declared sizes: TrimmedEBCSharder"]),
        (TrimmedEC(), []),
        (TrimmedEC("row_wise"), ["tables has sequences of tables that are split by rows"]),
        (ShardedEmbeddingCollection(), ["tables needs", "tables gives ids with its vectors"]),
        (ShardedTower(), ["tables is a ShardedTower, which no graph of an iteration takes"]),
        (TrimmedEBC("row_wise"), ["tables has tables that are split by rows: TrimmedEBCSharder(row_capacity=1.0)"]),
        (TrimmedEBC(kernel="fused_uvm_caching"), ["tables has tables in host memory"]),
        (TrimmedEBC(optimizer="adam"), ["tables is updated by adam, which counts its steps on the host"]),
    ],
)
def test_modules(module: nn.Module, said: list[str]) -> None:
    model = nn.Module()
    model.tables = module
    found = of_pipeline(SimpleNamespace(_model=model))
    assert len(found) == len(said)
    assert all(line.startswith(begins) for line, begins in zip(found, said, strict=True))


def test_a_pipeline_without_a_model_has_no_obstacle() -> None:
    assert of_pipeline(None) == of_pipeline(SimpleNamespace()) == []
