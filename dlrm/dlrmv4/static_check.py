"""The static pipeline's requirements on DLRMv4's configuration; needs no torch."""

from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.dlrmv4.config import ModelConfig


def check_static(config: TrainingConfig, options: StaticDenseOptions) -> None:
    """Raises ValueError, naming the flag, where the static pipeline cannot train `config`."""
    model = config.model
    assert isinstance(model, ModelConfig)
    for flag, chosen in (
        ("--peer-memory", options.peer_memory),
        ("--presort-ids", options.may_go_in_parts),
    ):
        require(not chosen, f"{flag} is for models with pooled tables, which DLRMv4's are not: leave it out")
    dim = model.embedding_dim
    require(
        dim & (dim - 1) == 0,
        f"--pipeline static looks up rows of a power of two columns, and --model.embedding-dim is {dim}: choose one",
    )
    require(
        model.network == "own",
        f"--model.network {model.network} is for --pipeline torchrec: its batches have no fixed shapes",
    )
    if options.eight_bits:
        require(config.precision == "bf16", f"--fp8 needs --precision bf16, not {config.precision}")
        require(
            model.kernels == "fused",
            f"--fp8 needs --model.kernels fused, whose norms write e4m3, not {model.kernels}",
        )
    captures = getattr(getattr(config, "pipeline", None), "cuda_graph", "none") != "none"
    require(
        not (captures and model.recompute_layers and model.kernels == "plain"),
        "--model.recompute-layers: torch.utils.checkpoint reads the generator's state, which no CUDA graph can: add "
        "--model.kernels fused, which computes again by itself, or leave it out",
    )
