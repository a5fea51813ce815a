"""What the static pipeline asks of DLRMv4's configuration; needs no torch."""

from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.dlrmv4.config import ModelConfig


def check_static(config: TrainingConfig, options: StaticDenseOptions) -> None:
    """Raise ValueError, naming the flag, where the static pipeline cannot train what `config` says."""
    assert isinstance(config.model, ModelConfig)
    for flag, chosen in (
        ("--fp8", options.eight_bits),
        ("--peer-memory", options.peer_memory),
        ("--presort-ids", options.may_go_in_parts),
    ):
        require(not chosen, f"{flag} is of models with pooled tables, which DLRMv4's are not: leave it out")
