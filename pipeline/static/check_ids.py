"""A check of ids on the device, where they are used: finds errors that the readers' checks on the host cannot.

An input dist that gives rows places uses ids while the previous batch trains; its batches are checked on the host too,
before it: an id beyond all rows has no place.
"""

import torch

from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.tables.tables import Tables


def check_ids(batch: Batch, tables: Tables, rank: int, iteration: int) -> None:
    """Raises ValueError, naming the first id of a batch that is outside its table. Waits for its device.

    rank, iteration: for the message.
    """
    blocks = feature_blocks(batch.ids, tables.hot)
    bad = [(block < 0) | (block >= rows) for block, rows in zip(blocks, tables.rows, strict=True)]
    found = torch.stack([of_feature.any() for of_feature in bad]).cpu()
    if not found.any():
        return
    feature = int(found.nonzero()[0])
    sample, position = bad[feature].nonzero()[0].tolist()
    raise ValueError(
        f"--check-ids: iteration {iteration}, rank {rank}: id {int(blocks[feature][sample, position])} of local sample "
        f"{sample} ({tables.names[feature]}) is outside its table of {tables.rows[feature]} rows, on "
        f"{batch.ids.device}"
    )
