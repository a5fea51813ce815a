"""A check of ids on the device, where they are used: for what the readers' checks on the host do not settle."""

import torch

from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.data.batch import Batch, feature_blocks


def check_ids(batch: Batch, model: ModelConfig, padded: bool, rank: int, iteration: int) -> None:
    """ValueError names the first id of a batch on the device that is outside its table. Waits for the device.

    padded: whether an id may be -1, which means none. rank, iteration: for the message.
    """
    lowest = -1 if padded else 0
    blocks = feature_blocks(batch.ids, model.multi_hot_sizes)
    bad = [(block < lowest) | (block >= rows) for block, rows in zip(blocks, model.rows, strict=True)]
    found = torch.stack([of_feature.any() for of_feature in bad]).cpu()
    if not found.any():
        return
    feature = int(found.nonzero()[0])
    sample, position = bad[feature].nonzero()[0].tolist()
    raise ValueError(
        f"--check-ids: iteration {iteration}, rank {rank}: id {int(blocks[feature][sample, position])} of local sample "
        f"{sample} ({model.feature_names[feature]}) is outside its table of {model.rows[feature]} rows, on "
        f"{batch.ids.device}"
    )
