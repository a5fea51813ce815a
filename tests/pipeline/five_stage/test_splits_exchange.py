"""The one exchange delivers what TorchRec's KJTAllToAll does, with the lengths per key known to the host."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAll

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.splits_exchange import ExchangeRequest, SplitsExchange
from tests.cases import GPU_PLACES

KEYS = ["a", "b", "c", "d", "e"]


@dataclass(frozen=True)
class Case:
    splits: tuple[tuple[int, ...], ...]
    """Features that go to each rank, of each all-to-all of the input dist."""
    known: tuple[bool, ...]
    """Whether the host knows the lengths per key, of each."""
    sizes: tuple[int, int] = (3, 3)
    """Batch size of each rank."""
    weighted: bool = False


CASES = [
    Case(((2, 3),), (True,)),
    Case(((2, 3),), (False,)),
    Case(((2, 3), (4, 1), (1, 4)), (True, False, True)),
    Case(((5, 0), (0, 5)), (False, True)),
    Case(((2, 3), (3, 2)), (True, False), sizes=(3, 5)),
    Case(((2, 3),), (False,), weighted=True),
    Case(((2, 3),), (True,), sizes=(0, 2), weighted=True),
]


def random_kjt(case: Case, index: int, rank: int, seed: int, device: torch.device) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * seed + 10 * index + rank)
    lengths = torch.randint(0, 4, (len(KEYS) * case.sizes[rank],), generator=generator, dtype=torch.int32)
    count = int(lengths.sum())
    features = KeyedJaggedTensor(
        keys=KEYS,
        values=torch.randint(0, 1000, (count,), generator=generator),
        lengths=lengths,
        weights=torch.rand(count, generator=generator) if case.weighted else None,
        stride=case.sizes[rank],
    )
    return (features.sync() if case.known[index] else features).to(device)


def received(features: KeyedJaggedTensor) -> dict[str, Any]:
    known = features.length_per_key_or_none()
    weights = features.weights_or_none()
    return {
        "keys": features.keys(),
        "values": features.values().tolist(),
        "lengths": features.lengths().tolist(),
        "weights": None if weights is None else weights.tolist(),
        "stride": features.stride(),
        "length_per_key": known,
        "offset_per_key": features.offset_per_key(),
    }


def exchange(ranks: Ranks) -> list[list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Ours and TorchRec's, of each all-to-all of each case; two batches of each with the same exchange."""
    group, results = dist.GroupMember.WORLD, []
    for case in CASES:
        ours = SplitsExchange(ranks.device)
        modules = [KJTAllToAll(group, list(splits)) for splits in case.splits]
        for seed in range(2):
            indices = range(len(modules))
            sent = [random_kjt(case, index, ranks.rank, seed, ranks.device) for index in indices]
            requests = [ExchangeRequest(kjt, to_all, group) for kjt, to_all in zip(sent, modules, strict=True)]
            ours.start(requests)
            travelling = [request.wait() for request in requests]
            pairs = []
            for index, tensors in enumerate(travelling):
                theirs = modules[index](random_kjt(case, index, ranks.rank, seed, ranks.device)).wait()
                splits = [(mine._input_splits["values"], mine._output_splits["values"]) for mine in (tensors, theirs)]
                assert splits[0] == splits[1]
                assert tensors._stride_per_rank == theirs._stride_per_rank
                pairs.append((received(tensors.wait()), received(theirs.wait())))
            results.append(pairs)
    return results


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), GPU_PLACES[1]])
def test_delivers_what_torchrec_does(run_ranks, world_size, gpu):
    for of_rank in run_ranks(world_size, exchange, gpu=gpu):
        assert len(of_rank) == 2 * len(CASES)
        for pairs in of_rank:
            for ours, theirs in pairs:
                assert ours == theirs
    assert any(ours["values"] for pairs in of_rank for ours, _ in pairs)
