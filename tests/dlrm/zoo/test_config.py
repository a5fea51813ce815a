"""The sizes of the TorchRec models: their tables, and errors that name a flag."""

from typing import Any

import pytest

from dlrm_bench.dlrm.optimizers import SGD, Adagrad, RowWiseAdagrad
from dlrm_bench.dlrm.zoo.config import (
    DeepFmModel,
    DlrmDcnModel,
    DlrmModel,
    DlrmProjectionModel,
    RandomData,
    SequenceModel,
    TwoTowersModel,
    ZooOptimizer,
)


def test_tables_are_those_that_are_built() -> None:
    tables = DlrmModel(rows=1000, table_scale=0.1, user_features=2, item_features=1).tables
    assert (tables.names, tables.rows, tables.columns, tables.hot) == (("u0", "u1", "i0"), (100,) * 3, 64, (2,) * 3)
    tables = SequenceModel(item_features=2, longest=9).tables
    assert (tables.names, tables.hot) == (("history", "i0", "i1"), (9, 2, 2))
    assert TwoTowersModel().tables.count == 16


def test_optimizers_are_values() -> None:
    kinds = {name: type(ZooOptimizer(embedding=name).tables) for name in ("sgd", "adagrad", "rowwise_adagrad")}
    assert kinds == {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad}


@pytest.mark.parametrize(
    ("kind", "values", "error"),
    [
        (DlrmModel, {"rows": 0}, "--model.rows must be positive"),
        (DlrmModel, {"rows": 2**31}, "--model.rows is 2147483648: keep it below"),
        (DlrmModel, {"embedding_dim": 6}, "--model.embedding-dim is 6: FBGEMM"),
        (DlrmModel, {"table_scale": 2.0}, "--model.table-scale is 2.0"),
        (DlrmModel, {"dense_hidden": (256, 0)}, "--model.dense-hidden: every number must be positive"),
        (DlrmModel, {"over_hidden": (-8,)}, "--model.over-hidden: every number must be positive"),
        (DlrmModel, {"over_hidden": ()}, "--model.over-hidden is empty"),
        (DlrmDcnModel, {"cross_layers": -1}, "--model.cross-layers must be positive"),
        (DlrmDcnModel, {"cross_rank": 0}, "--model.cross-rank must be positive"),
        (DlrmDcnModel, {"over_hidden": (0,)}, "--model.over-hidden: every number must be positive"),
        (DlrmProjectionModel, {"projected": 0}, "--model.projected must be positive"),
        (DeepFmModel, {"hidden": -1}, "--model.hidden must be positive"),
        (TwoTowersModel, {"hidden": 0}, "--model.hidden must be positive"),
        (SequenceModel, {"hidden": -3}, "--model.hidden must be positive"),
        (SequenceModel, {"layers": -1}, "--model.layers must be positive"),
        (SequenceModel, {"heads": 3}, "--model.heads is 3: it must divide"),
        (SequenceModel, {"item_features": 0}, "--model.item-features must be positive"),
        (RandomData, {"random_batches": 0}, "--data.random-batches must be positive"),
        (ZooOptimizer, {"dense_learning_rate": 0.0}, "--optimizer.dense-learning-rate is 0.0"),
        (ZooOptimizer, {"eps": float("nan")}, "--optimizer.eps is nan"),
    ],
)
def test_a_wrong_size_is_named_by_its_flag(kind: Any, values: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        kind(**values)
