"""An HSTU ranking model on random histories, as a benchmark."""

from importlib import import_module
from typing import cast

from dlrm_bench.dlrm.benchmark import Benchmark, Parts, Preset
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.zoo.benchmark import MIN_TIME_S, PIPELINES
from dlrm_bench.dlrm.zoo.config import ZooOptimizer
from dlrm_bench.dlrm.zoo.hstu.config import SMALL, TINY, HstuData
from dlrm_bench.dlrm.zoo.ladders import ladders


def _parts() -> Parts:
    return cast(Parts, import_module("dlrm_bench.dlrm.zoo.hstu.parts"))


_OPTIMIZER = ZooOptimizer(embedding="rowwise_adagrad")
HSTU = Benchmark(
    name="hstu",
    title="HSTU",
    presets={
        "hstu-tiny": Preset(
            text="HSTU of two narrow layers: seconds on CPU cores.",
            training=TrainingConfig(
                model=TINY, data=HstuData(), optimizer=_OPTIMIZER, local_batch_size=32, precision="fp32"
            ),
            run={"min_time": MIN_TIME_S},
        ),
        "hstu-small": Preset(
            text="HSTU in DLRMv4's shapes with a tenth of its rows; 32 samples a GPU need 44 GiB on each of two.",
            # With this seed, 256 samples on two ranks have fewer elements than TorchRec's limit, 2 ** 31.
            training=TrainingConfig(
                model=SMALL, data=HstuData(), optimizer=_OPTIMIZER, local_batch_size=4, precision="bf16", seed=4
            ),
            run={"min_time": MIN_TIME_S},
        ),
    },
    ladders=ladders(
        for_graphs=("--data.padded",),
        whole="iteration-or-dense",  # dense if the plan splits tables by rows
    ),
    pipelines=PIPELINES,
    ruleset=None,
    work=None,
    parts=_parts,
)
