"""The TorchRec models, each as a separate benchmark, so that records and reports distinguish them."""

from importlib import import_module
from typing import cast

from dlrm_bench.dlrm.benchmark import Benchmark, Parts, Preset
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.zoo.config import (
    BagsModel,
    DeepFmModel,
    DlrmDcnModel,
    DlrmModel,
    DlrmProjectionModel,
    RandomData,
    SequenceData,
    SequenceModel,
    TwoTowersModel,
    ZooOptimizer,
)
from dlrm_bench.dlrm.zoo.ladders import ladders

MIN_TIME_S = 10.0
"""Seconds of timed iterations."""
PIPELINES = ("torchrec", "five-stage")


def _parts() -> Parts:
    return cast(Parts, import_module("dlrm_bench.dlrm.zoo.parts"))


def _preset(model: BagsModel, text: str, data: RandomData) -> Preset:
    """Returns a preset with 64 samples per rank, at which all of these models are host-bound."""
    training = TrainingConfig(model=model, data=data, optimizer=ZooOptimizer(), local_batch_size=64, precision="fp32")
    return Preset(training=training, text=text, run={"min_time": MIN_TIME_S})


def _benchmark(name: str, title: str, model: BagsModel, text: str) -> Benchmark:
    return Benchmark(
        name=name.replace("-", "_"),
        title=title,
        presets={name: _preset(model, text, RandomData())},
        ladders=ladders(whole="iteration"),
        pipelines=PIPELINES,
        ruleset=None,
        work=None,
        parts=_parts,
    )


SEQUENCE = Benchmark(
    name="zoo_sequence",
    title="sequence model",
    presets={
        "zoo-sequence": _preset(
            SequenceModel(),
            "Two layers of attention over histories of varying lengths (an EC).",
            SequenceData(),
        ),
        "zoo-sequence-padded": _preset(
            SequenceModel(), "The same with histories of the longest length alone.", SequenceData(full=True)
        ),
    },
    ladders=ladders(for_graphs=("--data.padded",), whole="iteration"),
    pipelines=PIPELINES,
    ruleset=None,
    work=None,
    parts=_parts,
)
ZOO: tuple[Benchmark, ...] = (
    _benchmark("zoo-dlrm", "DLRM", DlrmModel(), "TorchRec's DLRM, 16 tables of 100,000 rows."),
    _benchmark("zoo-dlrm-dcn", "DLRM_DCN", DlrmDcnModel(), "TorchRec's DLRM_DCN, 16 tables of 100,000 rows."),
    _benchmark(
        "zoo-dlrm-projection",
        "DLRM_Projection",
        DlrmProjectionModel(),
        "TorchRec's DLRM_Projection, 16 tables of 100,000 rows.",
    ),
    _benchmark("zoo-deepfm", "DeepFM", DeepFmModel(), "TorchRec's SimpleDeepFMNN, 16 tables of 100,000 rows."),
    _benchmark(
        "zoo-two-towers", "two towers", TwoTowersModel(), "Two EBCs of eight tables each, a tower on each of them."
    ),
    SEQUENCE,
)
"""Every TorchRec model."""
