"""The five-stage pipeline on TorchRec's modules: what the stock pipeline trains, under our schedule."""

from typing import Any

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from dlrm.config import RunConfig
from dlrm.cuda_graph import captures
from dlrm.embedding.trimmed_sharder import TrimmedEBC, TrimmedEBCSharder
from dlrm.ranks import Ranks
from pipeline.five_stage import FiveStageOptions, FiveStagePipeline
from pipeline.torchrec_model import TorchRecPipeline, quantized_codecs


class TorchRecFiveStagePipeline(TorchRecPipeline):
    """TorchRec's sharded DLRM_DCN under FiveStagePipeline; see pipeline.interface.Pipeline."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        """Needs an initialised process group; collective: every rank must construct it with the same config."""
        codecs, model = quantized_codecs(config, ranks.device), config.model
        if config.trim_input_dist:
            sizes = dict(zip(model.feature_names, model.multi_hot_sizes, strict=True))
            sharder = TrimmedEBCSharder(sizes, qcomm_codecs_registry=codecs, cuda_graph=config.graph_dists)
        else:
            sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
        super().__init__(config, ranks, sharder)

    def close(self) -> None:
        """Ends launching threads and destroys graphs."""
        for schedule in (self._train, self._eval):
            schedule.close()

    def describe(self) -> dict[str, Any]:
        """What the model's says; switches that were off although asked for, and why; features by their input dist."""
        off = dict(self._train.switched_off)
        if self._config.graph_dists and not captures(self._device):
            off["graph_dists"] = f"there are no CUDA graphs on {self._device}"
        described = {**super().describe(), "switched_off": off}
        for module in self._model.modules():
            if isinstance(module, TrimmedEBC):
                described["input_dist"] = module.trimmed_features()
                if self._config.graph_dists:
                    described["graphed_dists"] = [graphed.describe() for graphed in module.graphed()]
        return described

    def _schedule(self, training: bool) -> Any:
        config = self._config
        options = FiveStageOptions(
            avoid_record_streams=config.avoid_record_streams,
            pinned_d2h=config.pinned_d2h,
            cuda_graph="dense" if training and config.cuda_graph == "dense" else "none",
            launch_threads=config.launch_threads if training else 1,
        )
        return FiveStagePipeline(self._model, self._optimizer, self._device, options)
