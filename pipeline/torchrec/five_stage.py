"""The five-stage pipeline on TorchRec's modules: trains like the stock pipeline, with our schedule."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch.distributed as dist

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.torchrec_model import DeclaredSizes, TorchRecModel
from dlrm_bench.pipeline.five_stage.cuda_graph import captures
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions, HostSwitches
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.ebc import TrimmedEBC
from dlrm_bench.pipeline.five_stage.trimmed.ec_sharder import TrimmedEC, TrimmedECSharder
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from dlrm_bench.pipeline.torchrec.model import TorchRecPipeline
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches
from dlrm_bench.pipeline.torchrec.sharding import Codecs, Sharders, quantized_codecs

logger = logging.getLogger(__name__)

_ALL_TO_ALLS = {TrimmedEBC: 3, TrimmedEC: 1}
"""All-to-alls of an iteration that graphs may hold: of ids, pooled vectors and gradients; for sequences, only of
ids."""


class TorchRecFiveStagePipeline(TorchRecPipeline):
    """A model sharded by TorchRec, under FiveStagePipeline; see pipeline/interface.py."""

    def __init__(
        self, config: TrainingConfig, of_benchmark: TorchRecModel, options: FiveStageSwitches, ranks: Ranks
    ) -> None:
        """Collective, with the same configuration on every rank; needs an initialised process group.

        ValueError if no part of the model can be compiled.
        """
        self._switches = options
        self._caches_casts = options.cuda_graph == "none"
        codecs = quantized_codecs(options, ranks.device)
        drops_repeats = of_benchmark.drops_repeats and ranks.device.type == "cuda"
        sharders = Sharders.of_torchrec(codecs, drops_repeats)
        if options.trim_input_dist:
            sharders = _trimming(of_benchmark.sizes, codecs, options.graph_dists, options.row_capacity)
        super().__init__(config, of_benchmark, options, ranks, sharders)

    def close(self) -> None:
        """Ends launching threads and destroys graphs."""
        for schedule in (self._train, self._eval):
            schedule.close()

    def describe(self) -> dict[str, Any]:
        """Returns the model's description; requested switches that are off, with the reason; and features by the kind
        of their input dist.

        Collective, and the same on every rank.
        """
        everyone: list[dict[str, str]] = [{}] * self._ranks.world_size
        dist.all_gather_object(everyone, dict(self._train.switched_off))
        described = {**super().describe(), "switched_off": merged_reasons(everyone)}
        if graph := self._train.describe():
            described["iteration_graph"] = graph
        trimmed = {
            path: module for path, module in self._model.named_modules() if isinstance(module, TrimmedEBC | TrimmedEC)
        }
        if trimmed:
            described["input_dist"] = _merged(module.trimmed_features() for module in trimmed.values())
            if self._switches.graph_dists:
                described["graphed_dists"], why_not = self._graphed_dists(trimmed)
                if why_not is not None:
                    described["switched_off"]["graph_dists"] = why_not
                    if self._ranks.rank == 0:
                        logger.warning("graph_dists is off, or partly off: %s", why_not)
        return described

    def _graphed_dists(self, trimmed: Mapping[str, TrimmedEBC | TrimmedEC]) -> tuple[list[str], str | None]:
        """Returns what every rank replays, for several modules with their names, and why that is not everything.
        Collective."""
        own = [
            {**graphed.describe(), "name": _named(graphed.describe()["name"], path, len(trimmed))}
            for path, module in trimmed.items()
            for graphed in module.graphed()
        ]
        everyone: list[list[dict[str, Any]]] = [[]] * self._ranks.world_size
        dist.all_gather_object(everyone, own)
        replayed = sorted(set.intersection(*({of["name"] for of in rank if of["replayed"]} for rank in everyone)))
        most = sum(_ALL_TO_ALLS[type(module)] for module in trimmed.values())
        if len(replayed) == most:
            return replayed, None
        if not captures(self._device):
            return replayed, f"there are no CUDA graphs on {self._device}"
        failures = [
            f"rank {r}, {of['name']}: {of['failure']}" for r, n in enumerate(everyone) for of in n if of["failure"]
        ]
        return replayed, "; ".join(failures) or (
            f"{len(replayed)} of {most} all-to-alls are replayed: the others do not have fixed sizes and a single "
            "sharding type, are quantised, or have not run twice; a single rank has none"
        )

    def _schedule(self, training: bool) -> Any:
        chosen = {field.name: getattr(self._switches, field.name) for field in fields(HostSwitches)}
        if not training:
            chosen |= {"cuda_graph": "none", "launch_threads": 1, "peer_memory": False}
        options = FiveStageOptions(**chosen, uneven_end="ignore")  # a run gives all ranks the same number of batches
        return FiveStagePipeline(self._model, self._optimizer, self._device, options)


def _trimming(sizes: DeclaredSizes, codecs: Codecs | None, cuda_graph: bool, row_capacity: float | None) -> Sharders:
    """Returns sharders that remove the parts of input dists that declared sizes make constant."""
    return Sharders(
        TrimmedEBCSharder(sizes.bags, qcomm_codecs_registry=codecs, cuda_graph=cuda_graph, row_capacity=row_capacity),
        TrimmedECSharder(
            sizes.sequences,
            qcomm_codecs_registry=codecs,
            cuda_graph=cuda_graph,
            batch_ids=list(sizes.batches) or None,
        ),
    )


def _merged(everything: Iterable[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """Returns the lists of all under each key, joined and sorted."""
    merged: dict[str, set[str]] = {}
    for one in everything:
        for key, names in one.items():
            merged.setdefault(key, set()).update(names)
    return {key: sorted(names) for key, names in merged.items()}


def _named(what: str, path: str, modules: int) -> str:
    """Returns the name of an all-to-all, with its module if there are several."""
    return what if modules == 1 else f"{path}: {what}"


def merged_reasons(everyone: list[dict[str, str]]) -> dict[str, str]:
    """Returns switched_off of all ranks, merged: a reason that only some ranks have is given with its ranks."""
    merged = {}
    for option in dict.fromkeys(option for of_rank in everyone for option in of_rank):
        ranks_of: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(everyone):
            if option in of_rank:
                ranks_of.setdefault(of_rank[option], []).append(rank)
        merged[option] = "; ".join(
            why if len(ranks) == len(everyone) else f"rank {', '.join(map(str, ranks))}: {why}"
            for why, ranks in ranks_of.items()
        )
    return merged
