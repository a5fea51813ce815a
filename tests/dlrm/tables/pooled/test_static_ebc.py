"""The static EBC's layouts and updates against whole tables, on plans that no planner would make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.dcnv2.config import ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.runtime.peer_memory import Barrier, PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.pooled.distributed_ids import DistributedIds
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC, TableUpdates
from dlrm_bench.dlrm.tables.pooled.ways import Collectives, EmbeddingBarriers, InPeerMemory, Layout, Way

DIM = 64
MODEL = ModelConfig(
    num_embeddings=(50, 3, 1000, 7, 2000, 1, 200),
    multi_hot_sizes=(3, 1, 2, 5, 7, 1, 4),
    embedding_dim=DIM,
    bottom_mlp=(DIM,),
    top_mlp=(1,),
)
OPTIMIZER = OptimizerConfig(learning_rate=0.05)
SEED = 3
MOST_PARTS = 3
BARRIERS = EmbeddingBarriers(
    Barrier("ids", "writes before reads"),
    tuple(Barrier(f"pooled {part}", "writes before reads") for part in range(MOST_PARTS)),
    tuple(Barrier(f"gradients {part}", "writes before reads") for part in range(MOST_PARTS)),
)
SORTED = Barrier("sorted", "what ranks sort for one another, before it is read")


@dataclass(frozen=True, slots=True)
class Case:
    plan: Plan
    batch_size: int
    dtype: torch.dtype
    presort: bool
    parts: int = 1
    peers: bool = False
    """Through peer memory."""


def random_plan(seed: int, world_size: int) -> Plan:
    """Returns a plan of a width for each rank, each sharded table split by the width of some rank, its parts anywhere
    among such ranks."""
    random = Random(seed)
    while True:
        widths = [random.choice([16, 32, DIM]) for _ in range(world_size)]
        replicated = tuple(table for table in range(MODEL.num_features) if random.random() < 0.25)
        shards = []
        for table in set(range(MODEL.num_features)) - set(replicated):
            width = random.choice(widths)
            ranks = [rank for rank in range(world_size) if widths[rank] == width]
            shards += [Shard(random.choice(ranks), table, column, width) for column in range(0, DIM, width)]
        plan = Plan(world_size=world_size, shards=tuple(sorted(shards)), replicated=replicated)
        if all(plan.of_rank(rank) for rank in range(world_size)):
            plan.check(MODEL.tables)
            return plan


def in_row_parts(plan: Plan, seed: int) -> Plan:
    """Returns the same columns in parts of rows, each on any rank of their width; every rank keeps something."""
    random, shards = Random(seed), []
    widths = [plan.of_rank(rank)[0].columns for rank in range(plan.world_size)]
    whole = {plan.of_rank(rank)[0].table for rank in range(plan.world_size)}
    parts_of = {
        table: 1 if table in whole else random.choice([1, 2, min(5, rows), min(3, rows)])
        for table, rows in enumerate(MODEL.rows)
    }
    for shard in plan.shards:
        parts = min(parts_of[shard.table], MODEL.rows[shard.table])
        ranks = [rank for rank, width in enumerate(widths) if width == shard.columns]
        for part in range(parts):
            shards.append(replace(shard, row_part=part, row_parts=parts))
            if parts > 1:
                shards[-1] = replace(shards[-1], rank=random.choice(ranks))
    split = replace(plan, shards=tuple(sorted(shards)))
    split.check(MODEL.tables)
    return split


def shared_plan(world_size: int, alone: Sequence[int]) -> Plan:
    """The first two ranks hold halves of the same tables, and share their sort; any others hold the tables `alone`, or,
    without others, these are replicated."""
    others = world_size - 2
    halves = [table for table in range(MODEL.num_features) if table not in alone]
    shards = [Shard(rank, table, rank * DIM // 2, DIM // 2) for rank in range(2) for table in halves]
    shards += [Shard(2 + i % others, table, 0, DIM) for i, table in enumerate(alone if others else ())]
    plan = Plan(world_size, tuple(sorted(shards)), replicated=() if others else tuple(alone))
    plan.check(MODEL.tables)
    return plan


def cases_of(world_size: int, gpu: bool) -> list[Case]:
    plans = [random_plan(seed, world_size) for seed in range(6 if world_size < 3 else 3)]
    assert any(plan.replicated for plan in plans)
    assert any(not plan.replicated for plan in plans)
    if world_size > 1:
        assert any(len({shard.columns for shard in plan.shards}) > 1 for plan in plans), "ranks of different widths"
    cases = [Case(plan, [5, 16, 1][i % 3], torch.float32, presort=i % 2 == 0) for i, plan in enumerate(plans)]
    cases += [
        Case(plan, 6, torch.float32, presort=True, parts=parts) for plan, parts in zip(plans, (2, 3), strict=False)
    ]
    if 1 < world_size < 5:
        # Of 7, 1 and 1 ids a sample both ranks sort the 7 themselves.
        shared = [shared_plan(world_size, alone) for alone in ((1, 4) if world_size > 2 else (), (0, 2, 3, 6))]
        cases += [Case(plan, 6, torch.float32, presort=True, parts=parts) for plan in shared for parts in (1, 2)]
    cases += [replace(case, peers=True) for case in cases if case.presort]
    split = [in_row_parts(plan, seed) for seed, plan in enumerate(plans)]
    if world_size == 1:  # the first table of a rank stays whole
        split = [plan for plan in split if any(shard.row_parts > 1 for shard in plan.shards)]
    assert any(shard.row_parts > 1 for plan in split for shard in plan.shards)
    cases += [
        Case(plan, 6, torch.float32, presort=True, parts=parts) for plan, parts in zip(split, (1, 2, 3), strict=False)
    ]
    if gpu:
        cases += [Case(plan, 8, torch.bfloat16, presort=True) for plan in split]
        cases += [Case(plan, 8, torch.bfloat16, presort=i % 2 == 0, peers=i % 4 == 0) for i, plan in enumerate(plans)]
    return cases


def draw_ids(batch_size: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    blocks = [
        torch.randint(rows, (batch_size * hot,), generator=generator, dtype=torch.int32)
        for rows, hot in zip(MODEL.rows, MODEL.multi_hot_sizes, strict=True)
    ]
    return torch.cat(blocks)


class World:
    """One case on one rank, and what every rank's samples and all tables are."""

    def __init__(self, ranks: Ranks, case: Case) -> None:
        self.rank, self.device, self.case = ranks.rank, ranks.device, case
        way: Way = Collectives()
        self.peers: InPeerMemory | None = None
        if case.peers:
            memory, width = PeerMemory(ranks), (MODEL.num_features + 1) * DIM
            inputs = memory.zeros(case.batch_size, width, dtype=case.dtype)
            way = self.peers = InPeerMemory(memory, BARRIERS, inputs, DIM)
        shape = BatchShape(samples=case.batch_size, dtype=case.dtype, parts=case.parts)
        rate = torch.tensor([OPTIMIZER.learning_rate], device=ranks.device)
        updates = TableUpdates(OPTIMIZER.tables, rate, case.presort)
        self.ebc = StaticEBC(Layout(MODEL.tables, case.plan, ranks, shape), updates, way, SEED)
        self.tables = [torch.empty(rows, DIM, device=self.device) for rows in MODEL.rows]
        for table, weights in enumerate(self.tables):
            fill_initial_weights(weights, seed=SEED, table=table, num_embeddings=len(weights))
        sharded = set(range(MODEL.num_features)) - set(case.plan.replicated)
        self.is_sharded = torch.zeros(MODEL.num_features * DIM, dtype=torch.bool, device=self.device)
        for table in sharded:
            self.is_sharded[table * DIM : (table + 1) * DIM] = True
        self.batches = [
            [draw_ids(case.batch_size, rank, seed).to(self.device) for rank in range(ranks.world_size)]
            for seed in range(2)
        ]

    def global_blocks(self, batch: int) -> list[Tensor]:
        """[G, hot] of each feature."""
        per_rank = [feature_blocks(ids, MODEL.multi_hot_sizes) for ids in self.batches[batch]]
        return [torch.cat(blocks) for blocks in zip(*per_rank, strict=True)]

    def pooled(self, batch: int, tables: list[Tensor]) -> Tensor:
        """The plain pooled matrix of the global batch, [G, features * DIM]."""
        bags = [
            functional.embedding_bag(block.long(), table, mode="sum")
            for block, table in zip(self.global_blocks(batch), tables, strict=True)
        ]
        return torch.cat(bags, dim=1)

    def mine(self, matrix: Tensor) -> Tensor:
        """This rank's rows of a matrix of the global batch."""
        return matrix[self.rank * self.case.batch_size :][: self.case.batch_size]

    def columns_held(self, matrix: Tensor) -> Tensor:
        """This rank's shards' columns of a matrix of the global batch: the layout of `lookup`, all parts in order."""
        held = torch.cat([matrix[:, s.table * DIM + s.column :][:, : s.columns] for s in self.ebc.shards], dim=1)
        return self.by_part(held)

    def pooled_of_shards(self, batch: int) -> Tensor:
        """Returns the pooled vectors of this rank's shards, in the layout of `columns_held`: of their rows alone."""
        held = []
        for shard in self.ebc.shards:
            bags = self.pooled_of_rows(batch, shard.table, shard.row_part, shard.row_parts)
            held.append(bags[:, shard.column : shard.column + shard.columns])
        return self.by_part(torch.cat(held, dim=1))

    def pooled_of_rows(self, batch: int, table: int, row_part: int, row_parts: int) -> Tensor:
        """The plain pooled vectors of one table's part of rows, [G, DIM]."""
        rows = torch.zeros(len(self.tables[table]), 1, device=self.device)
        rows[row_part::row_parts] = 1
        block = self.global_blocks(batch)[table].long()
        return functional.embedding_bag(block, self.tables[table] * rows, mode="sum")

    def pooled_in_parts(self, batch: int) -> Tensor:
        """The plain pooled matrix of the global batch where the parts of a table's rows travel in `dtype`: each is
        rounded before they are added up."""
        row_parts = {shard.table: shard.row_parts for shard in self.case.plan.shards}
        pooled = []
        for table in range(MODEL.num_features):
            count = row_parts.get(table, 1)
            of_parts = [self.pooled_of_rows(batch, table, part, count).to(self.case.dtype) for part in range(count)]
            pooled.append(torch.stack(of_parts).float().sum(0))
        return torch.cat(pooled, dim=1)

    def by_part(self, matrix: Tensor) -> Tensor:
        """The rows of a matrix of the global batch, [rank][part] of them, in the order [part][rank]."""
        blocks = matrix.view(dist.get_world_size(), self.case.parts, -1, *matrix.shape[1:])
        return blocks.transpose(0, 1).flatten(0, 2)

    def input_dist(self, batch: int, out: DistributedIds | None = None) -> DistributedIds:
        """Into `out` where given, which all ranks are through with."""
        out = out or self.ebc.empty_ids()
        self.ebc.input_dist(self.batches[batch][self.rank], out)
        self.ebc.sort(out)
        if self.peers:  # what ranks sort for one another is read after the next barrier
            self.peers.memory.barrier(SORTED)
        return out

    def lookup(self, ids: DistributedIds) -> list[Tensor | None]:
        return [self.ebc.lookup(ids, part) for part in range(self.case.parts)]

    def output(self, pooled: Sequence[Tensor | None]) -> Tensor:
        """Returns all parts' pooled vectors in the interaction's input."""
        out = self.interaction_input()
        for part, (of_part, rows) in enumerate(zip(pooled, out.chunk(self.case.parts), strict=True)):
            self.ebc.output_dist(of_part, rows, part)
        return out

    def gradient_dist(self, grad: Tensor) -> Tensor:
        """Returns all parts' gradients, one below the other."""
        for part, rows in enumerate(grad.chunk(self.case.parts)):
            self.ebc.gradient_dist(rows, part)
        return self.ebc.gradients.flatten(0, 1).clone()

    def random(self, rows: int, columns: int, seed: int) -> Tensor:
        values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device, self.case.dtype)

    def interaction_input(self) -> Tensor:
        """Columns of a wider matrix, as the pipeline's are."""
        if self.peers:
            return self.peers.inputs.own[:, DIM:]
        wider = torch.zeros(self.case.batch_size, (MODEL.num_features + 1) * DIM, device=self.device)
        return wider.to(self.case.dtype)[:, DIM:]


def check_input_dist(ranks: Ranks, world: World) -> None:
    case, out = world.case, world.ebc.empty_ids()
    for batch in (0, 1):  # into the same memory twice
        world.input_dist(batch, out)
        blocks = world.global_blocks(batch)
        by_part = [world.by_part(blocks[shard.table]).chunk(case.parts) for shard in world.ebc.shards]
        expected = torch.cat([block.flatten() for part in zip(*by_part, strict=True) for block in part])
        assert torch.equal(out.ids, expected)
        assert out.ids.dtype == torch.int32
        fresh = world.input_dist(batch)
        assert torch.equal(fresh.ids, expected)
        if case.presort:
            assert out.sorted is not None
            assert fresh.sorted is not None
            assert torch.equal(out.sorted.ids, fresh.sorted.ids)
            assert torch.equal(out.sorted.bags, fresh.sorted.bags)
            if all(shard.row_parts == 1 for shard in world.ebc.shards):  # whoever sorted them
                alone = torch.empty_like(out.sorted.ids), torch.empty_like(out.sorted.bags)
                world.ebc._tbe.sort(out.ids, *alone)
                assert torch.equal(out.sorted.ids, alone[0])
                assert torch.equal(out.sorted.bags, alone[1])
            offsets = [0, *torch.tensor([s.rows(MODEL) for s in world.ebc.shards]).cumsum(0).tolist()]
            linear = []
            for s, first in zip(world.ebc.shards, offsets, strict=False):
                own = blocks[s.table].flatten()
                linear.append(own[own % s.row_parts == s.row_part] // s.row_parts + first)
            assert torch.equal(out.sorted.ids[out.sorted.ids >= 0], torch.cat(linear).sort().values)
        dist.barrier()  # in peer memory the others write to what is read above


def check_forward(ranks: Ranks, world: World) -> None:
    case = world.case
    ids = world.input_dist(0)
    expected = world.pooled_in_parts(0)
    pooled = world.lookup(ids)
    if not case.peers:
        held = torch.cat([part for part in pooled if part is not None])
        assert held.requires_grad != case.presort, "no autograd graph is kept for nothing"
        torch.testing.assert_close(held.detach(), world.pooled_of_shards(0).to(case.dtype))
    out = world.output(pooled)
    assert not out[:, ~world.is_sharded].any(), "columns of replicated tables are not the output dist's"
    world.ebc.lookup_replicated(ids, out)
    torch.testing.assert_close(out, world.mine(expected).to(case.dtype))


def check_gradient_dist(ranks: Ranks, world: World) -> None:
    """The output dist, A, moves numbers and changes none: the transpose is the inverse, to the bit. Where it adds up
    parts of rows, it is the transpose alone."""
    case = world.case
    y = world.random(case.batch_size, MODEL.num_features * DIM, seed=50 + ranks.rank)
    at_y = world.gradient_dist(y)
    if not case.peers:
        x = world.random(case.batch_size * ranks.world_size, at_y.shape[1], seed=ranks.rank)
        a_x = world.output(x.chunk(case.parts))
        inverse = all(shard.row_parts == 1 for shard in case.plan.shards)
        if inverse:
            assert torch.equal(world.gradient_dist(a_x), x)
        terms = a_x.double() * y.double()
        products = torch.stack([terms.sum(), (x.double() * at_y.double()).sum(), terms.square().sum()])
        dist.all_reduce(products)
        # Sums over parts of rows are rounded, and the products' terms, of about 1, cancel: the errors add up at random.
        rounding = 0.0 if inverse else 2 * torch.finfo(case.dtype).eps * products[2].sqrt().item()
        torch.testing.assert_close(products[0], products[1], rtol=1e-12, atol=rounding or 1e-12)
    # And on the matrix that every rank can draw for itself.
    whole = torch.cat([world.random(case.batch_size, y.shape[1], seed=50 + rank) for rank in range(ranks.world_size)])
    assert torch.equal(at_y, world.columns_held(whole))


def check_update(ranks: Ranks, world: World) -> None:
    """Two iterations of Adagrad on the rank's shards, replicated tables included."""
    case = world.case
    parameters = [weights.clone().requires_grad_() for weights in world.tables]
    adagrad = torch.optim.Adagrad(parameters, lr=OPTIMIZER.learning_rate, eps=OPTIMIZER.eps)
    for batch in (0, 1):
        grad = world.random(case.batch_size * ranks.world_size, MODEL.num_features * DIM, seed=batch)
        ids = world.input_dist(batch)
        pooled = world.lookup(ids)
        world.output(pooled)
        mine = world.mine(grad)
        world.gradient_dist(mine)
        world.ebc.update(ids, pooled[0])
        world.ebc.update_replicated(ids, mine)
        adagrad.zero_grad()
        world.pooled(batch, parameters).backward(grad.float())
        adagrad.step()
    held = set()
    for part in world.ebc.table_shards():
        shard, parameter = part.shard, parameters[part.shard.table]
        assert shard.rank == ranks.rank
        block = slice(shard.row_part, None, shard.row_parts), slice(shard.column, shard.column + shard.columns)
        sums = adagrad.state[parameter]["sum"][block]
        torch.testing.assert_close(part.state, sums, rtol=1e-4, atol=1e-5)
        # A gradient is a sum of random numbers, and Adagrad divides by its size: near zero rounding counts more.
        torch.testing.assert_close(part.weights, parameter.detach()[block], rtol=1e-4, atol=1e-4)
        held.add((shard.table, shard.column, shard.row_part))
    replicated = {(table, 0, 0) for table in case.plan.replicated}
    assert held == {(s.table, s.column, s.row_part) for s in world.ebc.shards} | replicated


CHECKS = (check_input_dist, check_forward, check_gradient_dist, check_update)
"""The checks in this order: the last one changes the tables."""


def check_all(ranks: Ranks, cases: list[Case]) -> int:
    for case in cases:
        world = World(ranks, case)
        for check in CHECKS:
            try:
                check(ranks, world)
            except Exception as error:
                error.add_note(f"{check.__name__} on rank {ranks.rank} of {case}")
                raise
    return len(cases)


@pytest.mark.parametrize(
    ("world_size", "gpu"),
    [
        (1, False),
        (2, False),
        (3, False),
        (4, False),
        pytest.param(1, True, marks=pytest.mark.gpu),
        pytest.param(2, True, marks=pytest.mark.multi_gpu),
        pytest.param(4, True, marks=pytest.mark.multi_gpu),
    ],
)
def test_layouts_and_updates_equal_whole_tables(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    cases = cases_of(world_size, gpu)
    assert run_ranks(world_size, check_all, cases, gpu=gpu) == [len(cases)] * world_size
