"""Configurations of older records, read as today's."""

from typing import Any

import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.config import PIPELINES, as_json
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.records.upgrade import defaults, upgraded
from dlrm_bench.dlrm.benchmarks import PRESETS
from tests.pipelines import changed

OLD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"name": "torchrec", "schedule": "sparse-dist"}),
    ({"ebc": "torchrec", "pipeline": None}, {"name": "torchrec", "schedule": "sparse-dist"}),
    ({"ebc": "torchrec", "pipeline": "stock"}, {"name": "torchrec", "schedule": "sparse-dist"}),
    ({"pipeline": "base", "inplace_copy": True}, {"name": "torchrec", "schedule": "base", "inplace_copy": True}),
    (
        {"pipeline": "five-stage", "cuda_graph": "dense", "row_wise": False, "launch_threads": 2},
        {"name": "five-stage", "cuda_graph": "dense", "row_wise": False, "launch_threads": 2},
    ),
    (
        {"ebc": "static", "cuda_graph": "iteration", "overlap": True},
        {"name": "static", "cuda_graph": "iteration", "overlap": True, "presort_ids": False},
    ),
    (
        {"ebc": "static", "pipeline": "five-stage", "cuda_graph": "iteration", "cuda_graph_fallback": True},
        {"name": "static", "cuda_graph": "try"},
    ),
]


@pytest.mark.parametrize(("old", "options"), OLD)
def test_schema_1(old: dict[str, Any], options: dict[str, Any]) -> None:
    config = upgraded({"preset": "smoke", "seed": 7, **old}, 1)
    assert config == {"preset": "smoke", "seed": 7, "pipeline": defaults(options["name"]) | options}


def test_no_older_run_was_timed_by_the_clock() -> None:
    """Also where its number of iterations was not given: today's preset would end it after ten seconds."""
    config = as_json(preset("mlperf-dcnv2"))
    del config["min_time"]
    assert upgraded(config, 2)["min_time"] is None


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_todays_schema_stays_as_it_is(pipeline: str) -> None:
    config = as_json(changed(preset("smoke"), pipeline))
    assert upgraded(config, 2) == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_benchmark_keeps_the_fields_that_it_has(name: str) -> None:
    config = as_json(preset(name))
    assert upgraded(config, 2) == config


def test_an_option_that_a_record_does_not_name_has_its_default() -> None:
    assert upgraded({"pipeline": {"name": "static"}}, 2)["pipeline"] == {"name": "static", **defaults("static")}


def test_a_pipeline_of_a_later_version_is_kept() -> None:
    assert upgraded({"pipeline": {"name": "later", "x": 1}}, 2) == {"pipeline": {"name": "later", "x": 1}}


def test_every_committed_record_is_read() -> None:
    names = set()
    for path in sorted((ROOT / "results").rglob("run.json")):
        options = read_record(path.parent).run["config"]["pipeline"]
        assert options.keys() == {"name", *defaults(options["name"])}
        names.add(options["name"])
    assert names == set(PIPELINES)


def test_fields_that_older_records_lack_say_what_runs_did_then() -> None:
    config = upgraded({"ebc": "static", "data": {"source": "random"}, "optimizer": {}}, 1)
    assert config["data"] == {"source": "random", "random_ids": "uniform"}
    assert config["optimizer"] == {"embedding": "adagrad"}
    today = as_json(preset("launch-bound"))
    assert today["data"]["random_ids"] == "expanded"
    assert upgraded(today, 2) == today
