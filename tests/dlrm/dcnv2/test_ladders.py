"""The built-in ladders: the flags that each rung adds, which launch/dlrm.py takes."""

from itertools import pairwise

import pytest

from dlrm_bench.dlrm.benchmark import Rung
from dlrm_bench.dlrm.dcnv2.ladders import LADDERS
from dlrm_bench.launch.dlrm import parse


def pairs(rung: Rung) -> set[tuple[str, ...]]:
    """Returns each flag with its values."""
    found: list[tuple[str, ...]] = []
    for word in rung.flags:
        if word.startswith("--"):
            found.append((word,))
        else:
            found[-1] += (word,)
    return set(found)


AFTER_ALL = ("one-launch-thread", "graph-dists")
"""Rungs of the five stages on which more changes than one of the five switches."""


@pytest.mark.parametrize("name", LADDERS)
def test_every_rung_is_a_valid_configuration(name: str) -> None:
    rungs = LADDERS[name]
    assert len({rung.name for rung in rungs}) == len(rungs)
    configs = [parse(["--preset", "launch-bound", "--data.path", "data", *rung.flags]) for rung in rungs]
    assert len(set(configs)) == (len(rungs) // 2 if name.startswith("same") else len(rungs))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (
            "five-stage",
            ["--avoid-record-streams", "--pinned-d2h", "--cuda-graph", "--launch-threads", "--trim-input-dist"],
        ),
        (
            "five-stage-trim-first",
            ["--trim-input-dist", "--cuda-graph", "--pinned-d2h", "--launch-threads", "--avoid-record-streams"],
        ),
    ],
)
def test_the_five_stages_gain_one_switch_a_rung(name: str, order: list[str]) -> None:
    rungs = [r for r in LADDERS[name] if "five-stage" in r.flags and r.name not in AFTER_ALL]
    assert pairs(rungs[0]) == {("--pipeline", "five-stage"), ("--no-row-wise",), ("--precision", "tf32")}
    added = [pairs(b) - pairs(a) for a, b in pairwise(rungs)]
    assert [[pair[0] for pair in more] for more in added] == [[flag] for flag in order]
    assert all(pairs(a) < pairs(b) for a, b in pairwise(rungs))
    assert all(("--precision", "tf32") in pairs(rung) for rung in rungs)


def test_the_drop_in_ends_in_one_graph_for_the_iteration() -> None:
    stock, separate, whole, by_peers = LADDERS["drop-in"]
    assert (stock, separate) == (LADDERS["five-stage"][0], LADDERS["five-stage"][-1])
    assert pairs(whole) - pairs(separate) == {("--cuda-graph", "iteration")}
    assert pairs(by_peers) - pairs(whole) == {("--peer-memory",)}
    config = parse(["--preset", "launch-bound", *whole.flags])
    assert (config.pipeline.cuda_graph, config.precision) == ("iteration", "tf32")


def test_every_rung_says_what_it_takes_away() -> None:
    for name, rungs in LADDERS.items():
        notes = [rung.note for rung in rungs if not (name.startswith("same") and rung.name.endswith("-a"))]
        assert all(note.endswith(".") and ". " not in note and len(note) <= 120 for note in notes)


def test_the_full_ladder_ends_in_everything() -> None:
    assert LADDERS["full"][: len(LADDERS["five-stage"])] == LADDERS["five-stage"]
    *_, all_switches, one_thread, graph_dists = LADDERS["five-stage"]
    assert pairs(all_switches) == pairs(LADDERS["five-stage-trim-first"][-1])
    assert pairs(all_switches) - pairs(one_thread) == {("--launch-threads", "2")}
    assert pairs(one_thread) < pairs(all_switches)
    assert pairs(graph_dists) - pairs(one_thread) == {("--graph-dists",)}
    assert pairs(one_thread) < pairs(graph_dists)
    last = {
        ("--pipeline", "static"),
        ("--cuda-graph", "iteration"),
        ("--overlap",),
        ("--presort-ids",),
        ("--peer-memory",),
        ("--precision", "bf16"),
    }
    assert pairs(LADDERS["full"][-1]) == last
