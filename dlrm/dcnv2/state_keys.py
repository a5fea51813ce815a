"""The keys of DLRM-DCNv2's weights in checkpoints: those of an unsharded torchrec.models.dlrm.DLRM_DCN."""

from dlrm_bench.dlrm.dcnv2.config import ModelConfig

TABLE_PREFIX = "t_"
"""Prefix of a table's name, followed by the name of its feature."""


def table_key(model: ModelConfig, table: int) -> str:
    """Returns the key of a table's weights in DLRM_DCN.state_dict()."""
    name = f"{TABLE_PREFIX}{model.feature_names[table]}"
    return f"sparse_arch.embedding_bag_collection.embedding_bags.{name}.weight"


def torchrec_names(config: ModelConfig) -> dict[str, str]:
    """Returns the key of each DenseNetwork weight in DLRM_DCN.state_dict(), by DenseNetwork's name."""
    names = {}
    top = len(config.top_mlp)
    for kind in ("weight", "bias"):
        for i in range(len(config.bottom_mlp)):
            names[f"bottom_mlp.{i}.{kind}"] = f"dense_arch.model._mlp.{i}._linear.{kind}"
        for i in range(top - 1):
            names[f"top_mlp.{i}.{kind}"] = f"over_arch.model.0._mlp.{i}._linear.{kind}"
        names[f"top_mlp.{top - 1}.{kind}"] = f"over_arch.model.1.{kind}"
    for i in range(config.cross_layers):
        names[f"cross.{i}.w"] = f"inter_arch.crossnet.W_kernels.{i}"
        names[f"cross.{i}.v"] = f"inter_arch.crossnet.V_kernels.{i}"
        names[f"cross.{i}.bias"] = f"inter_arch.crossnet.bias.{i}"
    return names
