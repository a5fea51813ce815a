"""The requirements of the static pipeline's stage 3 on DLRM-DCNv2's configuration; needs no torch."""

from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig


def check_static(config: TrainingConfig, options: StaticDenseOptions) -> None:
    """Raises ValueError, naming the flag, if stage 3 cannot train `config`."""
    model, data = config.model, config.data
    assert isinstance(model, ModelConfig)
    assert isinstance(data, DataConfig)
    require(
        not (model.raw_ids and data.source == "one_hot"),
        "--model.raw-ids: MLPerf's tables, which expand --data.source one_hot, have a declared size: choose multi_hot",
    )
    dim, features = model.embedding_dim, model.num_features
    if options.eight_bits:
        _check_eight_bits(config, model)
    require(
        (features + 1) * dim % 8 == 0,
        f"--pipeline static needs (features + 1) * --model.embedding-dim to be a multiple of 8, and "
        f"({features} + 1) * {dim} is not: choose a multiple of 8",
    )


def _check_eight_bits(config: TrainingConfig, model: ModelConfig) -> None:
    require(config.precision == "bf16", f"--fp8 needs --precision bf16, not {config.precision}")
    width = (model.num_features + 1) * model.embedding_dim
    require(
        width % 16 == 0,
        f"--fp8 needs (features + 1) * --model.embedding-dim to be a multiple of 16, and ({model.num_features} + 1)"
        f" * {model.embedding_dim} is not: choose a multiple of 16, or leave --fp8 out",
    )
    require(
        model.cross_rank % 16 == 0 and model.cross_rank <= 512,
        f"--fp8 needs --model.cross-rank to be a multiple of 16 up to 512, not {model.cross_rank}",
    )
    require(
        len(model.top_mlp) > 1 and model.top_mlp[0] % 16 == 0 and model.top_mlp[0] <= 1024,
        f"--fp8 needs --model.top-mlp to have more than one layer, the first a multiple of 16 up to 1024, not "
        f"{' '.join(map(str, model.top_mlp))}",
    )
    require(
        config.local_batch_size % 32 == 0,
        f"--fp8 needs --local-batch-size to be a multiple of 32, not {config.local_batch_size}",
    )
