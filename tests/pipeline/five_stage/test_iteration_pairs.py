"""The graph of each pair of forms: due once all of its work has run, and bounded in number."""

from dlrm_bench.pipeline.five_stage.iteration_pairs import MOST_CHANGES, Pair, Pairs


def test_a_pair_is_due_once_its_work_has_run() -> None:
    pairs = Pairs()
    pairs.rehearsed(Pair(0, 0))
    assert not pairs.is_due(Pair(0, 0))  # each turn runs once
    pairs.rehearsed(Pair(0, 0))
    assert pairs.is_due(Pair(0, 0))
    assert not pairs.is_due(Pair(0, 1))
    assert not pairs.is_due(Pair(1, 0))
    pairs.rehearsed(Pair(1, 0))
    assert pairs.is_due(Pair(1, 0))
    assert not pairs.is_due(Pair(1, 1))
    pairs.rehearsed(Pair(1, 1))
    assert pairs.is_due(Pair(0, 1))
    pairs.graphs[Pair(0, 1)] = []
    assert not pairs.is_due(Pair(0, 1))
    pairs.clear()
    assert pairs.is_due(Pair(0, 1))


def test_pairs_beyond_the_bound_train_by_a_graph_that_is_there() -> None:
    pairs, forms = Pairs(), range(1, MOST_CHANGES + 2)
    assert pairs.of(0, None) == Pair(0, 0)
    for ahead in forms[:-1]:
        assert pairs.of(0, ahead) == Pair(0, ahead)
        pairs.agree(Pair(0, ahead))
    assert pairs.of(0, forms[-1]) == Pair(0, 1)
    assert pairs.of(0, None) == Pair(0, 1)
    assert pairs.of(1, 2) == Pair(1, 1)
    assert pairs.of(1, 1) == Pair(1, 1)
    assert pairs.of(0, 3) == Pair(0, 3)
    pairs.clear()
    assert pairs.of(0, forms[-1]) == Pair(0, 1)  # not what this rank has captured, but what all have
