"""Exact AUC, on one rank and over all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor


def exact_auc(scores: Tensor, labels: Tensor) -> float:
    """Returns the area under the ROC curve: the chance that a positive sample scores above a negative one, ties
    counting half.

    scores: floating point [N]; any increasing function of the probability, such as logits, gives the same AUC. labels:
    [N], 1 positive and 0 negative.

    The Mann-Whitney statistic, doubled so that ties stay integers, is summed in int64: exact up to the final division
    for 2 * positives * negatives < 2^63, far above the 89 million samples that MLPerf evaluates. Raises ValueError for
    NaN scores and if either class is empty.
    """
    if scores.isnan().any():
        raise ValueError("the AUC is undefined: some scores are NaN; if they come from a model, its training diverged")
    order = scores.argsort()
    sorted_scores = scores[order]
    positive = labels[order].to(torch.int64)
    positives = int(positive.sum())
    negatives = positive.numel() - positives
    if positives == 0 or negatives == 0:
        raise ValueError(f"the AUC is undefined: {positives} positive and {negatives} negative samples")
    # Samples with equal scores form a group; `last` is the index of each group's last sample.
    last = torch.cat([sorted_scores[1:] != sorted_scores[:-1], positive.new_ones(1, dtype=torch.bool)]).nonzero()[:, 0]
    seen_positive = positive.cumsum(0)[last]
    seen_negative = last + 1 - seen_positive
    group_positive = seen_positive.diff(prepend=seen_positive.new_zeros(1))
    negative_below = torch.cat([seen_negative.new_zeros(1), seen_negative[:-1]])
    doubled = int((group_positive * (negative_below + seen_negative)).sum())
    return doubled / (2 * positives * negatives)


def distributed_auc(scores: Tensor, labels: Tensor) -> float:
    """Returns `exact_auc` over the samples of all ranks, the same value on every rank. Collective.

    scores: float32 [n], labels: [n], on the process group's device; n may differ between ranks and may be 0.
    Every rank gathers all samples (five bytes each: 450 MB for MLPerf's 89 million) and sorts them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return exact_auc(scores, labels)
    world_size = dist.get_world_size()
    counts = torch.zeros(world_size, dtype=torch.int64, device=scores.device)
    dist.all_gather_into_tensor(counts, torch.tensor([scores.numel()], device=scores.device))
    longest = int(counts.max())
    every_count: list[int] = counts.tolist()

    def gather(values: Tensor) -> Tensor:
        padded = values.new_zeros(longest)
        padded[: values.numel()] = values
        gathered = values.new_empty(world_size * longest)
        dist.all_gather_into_tensor(gathered, padded)
        return torch.cat([gathered[r * longest : r * longest + n] for r, n in enumerate(every_count)])

    return exact_auc(gather(scores), gather(labels.to(torch.uint8)))
