"""The user's constraints by table, in the format of TorchRec's planner."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams

from dlrm_bench.dlrm.tables.plan.constraints import FLAG, Constraints, ShardingKind
from dlrm_bench.dlrm.tables.tables import Tables


def with_constraints(
    given: Mapping[str, ParameterConstraints], constraints: Constraints, tables: Tables, prefix: str, prefetches: bool
) -> dict[str, ParameterConstraints]:
    """Returns the planner's existing constraints, combined with the user's. prefix: of the table names in TorchRec's
    model. prefetches: whether the train pipeline fills caches ahead."""
    constrained = dict(given)
    for table, constraint in constraints.items():
        name = prefix + tables.names[table]
        wishes = given.get(name, ParameterConstraints())
        if constraint.kind is not None:
            wishes = replace(wishes, sharding_types=[_sharding_type(constraint.kind)])
        if constraint.columns is not None:
            wishes = replace(wishes, min_partition=constraint.columns)  # TorchRec uses it as the shards' width
        if constraint.device_share is not None:
            wishes = _with_kernel(wishes, constraint.device_share, prefetches)
        constrained[name] = wishes
    return constrained


def check_offered(constraints: Constraints, tables: Tables, offered: Collection[str]) -> None:
    """Raises ValueError, naming a constraint whose sharding type TorchRec does not offer."""
    for table, constraint in constraints.items():
        if constraint.kind is not None and _sharding_type(constraint.kind) not in offered:
            raise ValueError(
                f"{FLAG} {tables.names[table]}={constraint}: TorchRec offers no {constraint.kind} tables on this "
                "device with this --schedule; choose another sharding"
            )


def _sharding_type(kind: ShardingKind) -> str:
    """Returns TorchRec's name of a sharding kind."""
    return kind.replace("-", "_")


def _with_kernel(wishes: ParameterConstraints, share: float, prefetches: bool) -> ParameterConstraints:
    """Returns constraints with the compute kernel for a table, of whose rows the GPU holds `share`."""
    if share in (0, 1):
        kernel = EmbeddingComputeKernel.FUSED if share else EmbeddingComputeKernel.FUSED_UVM
        return replace(wishes, compute_kernels=[kernel.value])
    kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING
    return replace(
        wishes,
        compute_kernels=[kernel.value],
        cache_params=CacheParams(load_factor=share, prefetch_pipeline=prefetches),
    )
