"""FBGEMM's TBE at fixed shapes: its order of bags, the sort that the update needs, and views of its memory."""

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE, TBEShape

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
# FBGEMM packs sample and table into 32 bits; from eight tables on they may reach the sign bit.
NUM_TABLES = [1, 2, 3, 7, 8, 9, 11]
ROWS = [3, 1000, 1, 70000, 17, 5, 4097, 64, 2, 33000, 9]
HOT = [2, 1, 3, 5, 1, 4, 1, 2, 1, 7, 1]
COLUMNS = 16
OPTIMIZER = OptimizerConfig(learning_rate=0.1)


def make(
    tables: int, samples: int, device: torch.device, dtype: torch.dtype = torch.float32, parts: int = 1
) -> tuple[FixedTBE, list[Tensor]]:
    """A TBE with random weights, and random ids [samples, hot] of each table of each part, on the CPU."""
    generator = torch.Generator().manual_seed(tables)
    rows, hot = tuple(ROWS[:tables]), tuple(HOT[:tables])
    shape = TBEShape(rows=rows, hot=hot, columns=COLUMNS, samples=samples, dtype=dtype, parts=parts)
    tbe = FixedTBE(shape, OPTIMIZER.tables, OPTIMIZER.learning_rate, device, sorted_updates=True)
    tbe.weights.copy_(torch.randn(tbe.weights.shape, generator=generator))
    ids = [
        torch.randint(rows, (samples, hot), generator=generator, dtype=torch.int32)
        for _ in range(parts)
        for rows, hot in zip(ROWS[:tables], HOT[:tables], strict=True)
    ]
    return tbe, ids


def flat(ids: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat([block.flatten() for block in ids]).to(device)


def tables_of(tbe: FixedTBE) -> Iterator[Tensor]:
    for start, rows in zip(tbe.first_row, ROWS, strict=False):
        yield tbe.weights[start : start + rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("samples", [1, 37, 1024])
@pytest.mark.parametrize(("tables", "parts"), [*((tables, 1) for tables in NUM_TABLES), (3, 2), (1, 3)])
def test_sort_equals_a_naive_sort(tables: int, parts: int, samples: int, device: torch.device) -> None:
    tbe, ids = make(tables, samples, device, parts=parts)
    naive = sorted(
        (tbe.first_row[block % tables] + row, (block // tables * samples + sample) * tables + block % tables)
        for block, bags in enumerate(ids)
        for sample, bag in enumerate(bags.tolist())
        for row in bag
    )
    sorted_ids, sorted_bags = torch.full((2, tbe.num_ids), -1, dtype=torch.int32, device=device)
    tbe.sort(flat(ids, device), sorted_ids, sorted_bags)
    # A table's ids are in sample order already, so a stable sort leaves the bags of a row in ascending order.
    assert sorted_ids.tolist() == [row for row, _ in naive]
    assert sorted_bags.tolist() == [bag for _, bag in naive]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("raw", [False, True])
def test_keys_are_told_apart_by_table_and_places_are_sorted(raw: bool, device: torch.device) -> None:
    """Of two parts of a batch. Equal ids of two tables have other keys."""
    rows, hot, samples, parts, places = (50, 20, 9), (2, 3, 1), 5, 2, 4000
    sizes = {"rows": rows, "hot": hot, "columns": COLUMNS, "samples": samples, "parts": parts, "raw_ids": raw}
    shape = TBEShape(**sizes, dtype=torch.float32)
    tbe = FixedTBE(shape, OPTIMIZER.tables, 0.1, device, sorted_updates=True, places=places)
    of_ids = torch.tensor([t for t, n in enumerate(hot) for _ in range(samples * n)] * parts, device=device)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(9, (tbe.num_ids,), generator=generator).to(device, torch.int64 if raw else torch.int32)
    keys = tbe.keys_of(ids)
    if raw:
        assert torch.equal(keys.ids, ids)
        assert keys.tables is not None
        assert torch.equal(keys.tables.long(), of_ids)
    else:
        assert torch.equal(keys.ids, ids + torch.tensor([0, 50, 70], dtype=torch.int32, device=device)[of_ids])
    given = torch.randint(places, (tbe.num_ids,), generator=generator).to(device, torch.int32)
    ordered, bags = torch.full((2, tbe.num_ids), -1, dtype=torch.int32, device=device)
    tbe.sort(given, ordered, bags)
    expected, order = given.sort(stable=True)
    samples_of = [
        part * samples + sample for part in range(parts) for n in hot for sample in range(samples) for _ in range(n)
    ]
    assert torch.equal(ordered, expected)
    assert torch.equal(bags, (torch.tensor(samples_of, device=device) * len(rows) + of_ids)[order].int())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tables", NUM_TABLES)
def test_lookup_equals_embedding_bag(tables: int, device: torch.device) -> None:
    tbe, ids = make(tables, 37, device)
    pooled = tbe.lookup(flat(ids, device))
    expected = [
        functional.embedding_bag(block.long().to(device), weights, mode="sum")
        for block, weights in zip(ids, tables_of(tbe), strict=True)
    ]
    torch.testing.assert_close(pooled.detach(), torch.cat(expected, dim=1))
    # The bag of (sample, table) is row sample * tables + table of the view that `sort` numbers.
    torch.testing.assert_close(pooled.detach().view(-1, COLUMNS)[36 * tables + tables - 1], expected[-1][36])


@pytest.mark.parametrize("device", DEVICES)
def test_without_fbgemm_the_state_of_a_row_lies_after_its_weights(device: torch.device) -> None:
    rows = ROWS[:3]
    shape = TBEShape(rows=tuple(rows), hot=tuple(HOT[:3]), columns=COLUMNS, samples=5, dtype=torch.float32)
    tbe = FixedTBE(shape, OPTIMIZER.tables, OPTIMIZER.learning_rate, device, sorted_updates=True, fbgemm=False)
    assert tbe.weights.shape == tbe.state.shape == (sum(rows), COLUMNS)
    assert tbe.weights[1].data_ptr() - tbe.weights.data_ptr() == 2 * 4 * COLUMNS
    assert tbe.state.data_ptr() - tbe.weights.data_ptr() == 4 * COLUMNS
    assert not tbe.state.any()
    tbe.set_learning_rate(0.5)  # of FBGEMM's backward, which there is not
    with pytest.raises(AssertionError):
        tbe.lookup(torch.zeros(tbe.num_ids, dtype=torch.int32, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_bags_of_any_length_are_looked_up_outside_the_autograd_graph(device: torch.device) -> None:
    """Rows beyond the last bag, as lists of picked ids have them, are in none."""
    tables, samples, lengths = 3, 5, (0, 3, 1, 2, 0)
    tbe, _ = make(tables, samples, device)
    bags = [(torch.arange(n, device=device) + n) % ROWS[table] for table in range(tables) for n in lengths]
    rows = torch.cat([*bags, torch.zeros(4, device=device)]).int()
    offsets = torch.tensor([0, *accumulate(map(len, bags))], dtype=torch.int32, device=device)
    pooled = tbe.lookup_bags(rows, offsets)
    assert not pooled.requires_grad
    weights = [of_table for of_table in tables_of(tbe) for _ in lengths]
    sums = torch.stack([of_table[bag].sum(0) for of_table, bag in zip(weights, bags, strict=False)])
    expected = sums.view(tables, samples, COLUMNS).transpose(0, 1).reshape(samples, -1)
    torch.testing.assert_close(pooled, expected)


@pytest.mark.gpu
def test_lookup_in_bf16_rounds_the_sum_once() -> None:
    """FBGEMM pools in fp32 whatever it puts out."""
    device = torch.device("cuda")
    tbe, ids = make(11, 37, device, torch.bfloat16)
    exact, _ = make(11, 37, device)
    assert torch.equal(tbe.weights, exact.weights)
    pooled = tbe.lookup(flat(ids, device)).detach()
    assert pooled.dtype == torch.bfloat16
    torch.testing.assert_close(pooled, exact.lookup(flat(ids, device)).detach().bfloat16())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tables", [1, 9])
def test_weights_and_state_are_what_the_backward_updates(tables: int, device: torch.device) -> None:
    samples = 37
    tbe, ids = make(tables, samples, device)
    parameters = [weights.clone().requires_grad_() for weights in tables_of(tbe)]
    adagrad = torch.optim.Adagrad(parameters, lr=OPTIMIZER.learning_rate, eps=OPTIMIZER.eps)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        grad = torch.randn(samples, tables * COLUMNS, generator=generator).to(device)
        tbe.lookup(flat(ids, device)).backward(grad)
        adagrad.zero_grad()
        bags = [
            functional.embedding_bag(block.long().to(device), weights, mode="sum")
            for block, weights in zip(ids, parameters, strict=True)
        ]
        torch.cat(bags, dim=1).backward(grad)
        adagrad.step()
    torch.testing.assert_close(tbe.weights, torch.cat(parameters).detach(), rtol=1e-4, atol=1e-4)
    sums = torch.cat([adagrad.state[parameter]["sum"] for parameter in parameters])
    torch.testing.assert_close(tbe.state, sums, rtol=1e-4, atol=1e-5)
    assert sums.any()
    assert (sums == 0).any() == (tables > 1), "untouched rows keep a state of zero"


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_to_weights_is_looked_up(device: torch.device) -> None:
    tbe, ids = make(3, 5, device)
    tbe.weights.fill_(2.0)
    pooled = tbe.lookup(flat(ids, device)).detach().view(5, 3, COLUMNS)
    assert torch.equal(pooled, 2.0 * torch.tensor(HOT[:3], device=device)[:, None].expand(5, 3, COLUMNS))


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_is_looked_up_by_itself(device: torch.device) -> None:
    tbe, ids = make(3, 5, device, parts=2)
    for part in (0, 1):
        bags = [
            functional.embedding_bag(block.long().to(device), weights, mode="sum")
            for block, weights in zip(ids[3 * part : 3 * part + 3], tables_of(tbe), strict=True)
        ]
        torch.testing.assert_close(tbe.lookup(flat(ids, device), part).detach(), torch.cat(bags, dim=1))


@pytest.mark.parametrize("fbgemm", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_tables_share_memory_of_other_rows(device: torch.device, fbgemm: bool) -> None:
    """Where places take the place of rows: lookup and FBGEMM's update are those of tables in full, to the bit."""
    full, ids = make(3, 37, device)
    shape, places = full._shape, 5000
    shared = FixedTBE(
        shape,
        OPTIMIZER.tables,
        OPTIMIZER.learning_rate,
        device,
        sorted_updates=not fbgemm,
        fbgemm=fbgemm,
        places=places,
    )
    assert shared.weights.shape == shared.state.shape == (places, COLUMNS)
    assert shared.by_places > full.by_places
    rows = full.rows_of(flat(ids, device))
    assert torch.equal(shared.rows_of(flat(ids, device)), rows), "rows are still those of all tables"
    if not fbgemm:
        assert shared.weights.stride() == shared.state.stride() == (2 * COLUMNS, 1)
        return
    place_of = torch.randperm(places, device=device)[: sum(ROWS[:3])]
    full = FixedTBE(shape, OPTIMIZER.tables, OPTIMIZER.learning_rate, device)
    full.weights.copy_(torch.randn(full.weights.shape))
    shared.weights[place_of] = full.weights
    for _ in range(2):
        pooled = full.lookup(flat(ids, device)), shared.lookup(place_of[rows.long()].int())
        assert torch.equal(*pooled)
        gradient = torch.randn(pooled[0].shape, device=device)
        for each in pooled:
            each.backward(gradient)
    assert torch.equal(full.weights, shared.weights[place_of])
    assert torch.equal(full.state, shared.state[place_of])
