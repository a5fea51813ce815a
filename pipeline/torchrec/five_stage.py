"""The five-stage pipeline on TorchRec's modules: what the stock pipeline trains, under our schedule."""

import logging
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from dlrm_bench.dlrm.dcnv2.config import DcnTraining
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.cuda_graph import captures
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBC, TrimmedEBCSharder
from dlrm_bench.pipeline.torchrec.model import TorchRecPipeline, quantized_codecs
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches

logger = logging.getLogger(__name__)

ALL_TO_ALLS = 3
"""All-to-alls of an iteration: ids, pooled vectors, their gradients."""


class TorchRecFiveStagePipeline(TorchRecPipeline):
    """TorchRec's sharded DLRM_DCN under FiveStagePipeline; see pipeline/interface.py."""

    def __init__(self, config: DcnTraining, options: FiveStageSwitches, ranks: Ranks) -> None:
        """Needs an initialised process group; collective: every rank must construct it with the same configuration."""
        self._switches = options
        self._caches_casts = options.cuda_graph == "none"
        codecs, model = quantized_codecs(options, ranks.device), config.model
        if options.trim_input_dist:
            sizes = dict(zip(model.feature_names, model.multi_hot_sizes, strict=True))
            sharder = TrimmedEBCSharder(sizes, qcomm_codecs_registry=codecs, cuda_graph=options.graph_dists)
        else:
            sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
        super().__init__(config, options, ranks, sharder)

    def close(self) -> None:
        """Ends launching threads and destroys graphs."""
        for schedule in (self._train, self._eval):
            schedule.close()

    def describe(self) -> dict[str, Any]:
        """Returns what the model's says; switches that were off although asked for, and why; features by their input
        dist.

        Collective, and the same on every rank.
        """
        everyone: list[dict[str, str]] = [{}] * self._ranks.world_size
        dist.all_gather_object(everyone, dict(self._train.switched_off))
        described = {**super().describe(), "switched_off": merged_reasons(everyone)}
        for module in self._model.modules():
            if isinstance(module, TrimmedEBC):
                described["input_dist"] = module.trimmed_features()
                if self._switches.graph_dists:
                    described["graphed_dists"], why_not = self._graphed_dists(module)
                    if why_not is not None:
                        described["switched_off"]["graph_dists"] = why_not
                        if self._ranks.rank == 0:
                            logger.warning("graph_dists is off, or in part: %s", why_not)
        return described

    def _graphed_dists(self, collection: TrimmedEBC) -> tuple[list[str], str | None]:
        """Returns what every rank replays, and why that is not everything. Collective."""
        everyone: list[list[dict[str, Any]]] = [[]] * self._ranks.world_size
        dist.all_gather_object(everyone, [graphed.describe() for graphed in collection.graphed()])
        replayed = sorted(set.intersection(*({of["name"] for of in rank if of["replayed"]} for rank in everyone)))
        if len(replayed) == ALL_TO_ALLS:
            return replayed, None
        if not captures(self._device):
            return replayed, f"there are no CUDA graphs on {self._device}"
        failures = [
            f"rank {r}, {of['name']}: {of['failure']}" for r, n in enumerate(everyone) for of in n if of["failure"]
        ]
        return replayed, "; ".join(failures) or (
            f"{len(replayed)} of {ALL_TO_ALLS} all-to-alls are replayed: the others are not of fixed sizes and one "
            "sharding type, are quantised, or have not run twice; a rank alone has none"
        )

    def _schedule(self, training: bool) -> Any:
        switches = {field.name for field in fields(self._switches)}
        chosen = {f.name: getattr(self._switches, f.name) for f in fields(FiveStageOptions) if f.name in switches}
        chosen["uneven_end"] = "ignore"  # a run gives all ranks the same number of batches
        if not training:
            chosen |= {"cuda_graph": "none", "launch_threads": 1}
        options = FiveStageOptions(**chosen)
        return FiveStagePipeline(self._model, self._optimizer, self._device, options)


def merged_reasons(everyone: list[dict[str, str]]) -> dict[str, str]:
    """switched_off of all ranks in one: a reason that not all ranks have is told with the ranks that have it."""
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
