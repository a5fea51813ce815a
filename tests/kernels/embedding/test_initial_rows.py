"""Initial weights of single rows: the Triton kernel against its plain twin, and both against whole tables."""

import pytest
import torch

from dlrm_bench.dlrm.tables.initial_weights import distribution, fill_initial_weights, table_key
from dlrm_bench.kernels.embedding import initial_rows as module
from dlrm_bench.kernels.embedding.id_map import Keys
from dlrm_bench.kernels.embedding.initial_rows import (
    RowsOfTables,
    initial_rows,
    plain_initial_rows,
    triton_initial_rows,
)
from tests.kernels.devices import DEVICE, needs_triton

ROWS, SEED, PART, PARTS = (50, 1, 700), 9, 1, 3
OF_OWNER = tuple(-(-rows // PARTS) for rows in ROWS)


def of_tables() -> RowsOfTables:
    first = torch.tensor([0, OF_OWNER[0], OF_OWNER[0] + OF_OWNER[1]], device=DEVICE)
    keys = torch.tensor([table_key(SEED, table) for table in range(3)], device=DEVICE)
    scales, bounds = torch.tensor([distribution(rows) for rows in ROWS], device=DEVICE).T.contiguous()
    return RowsOfTables(first, keys, scales, bounds, PART, PARTS)


@needs_triton
@pytest.mark.parametrize("columns", [16, 512])
@pytest.mark.parametrize("make", [plain_initial_rows, triton_initial_rows])
def test_rows_are_those_of_whole_tables(columns: int, make: object) -> None:
    count = sum(OF_OWNER)
    numbers = torch.randperm(count, device=DEVICE).int()
    targets = torch.where(numbers % 7 == 0, -1, numbers)
    out = torch.full((count, columns), 7.0, device=DEVICE)
    make(out, targets, Keys(numbers), of_tables())  # type: ignore[operator]
    first = 0
    for table, (rows, own) in enumerate(zip(ROWS, OF_OWNER, strict=True)):
        expected = torch.empty(own, columns, device=DEVICE)
        fill_initial_weights(expected, seed=SEED, table=table, num_embeddings=rows, row_offset=PART, row_step=PARTS)
        number = torch.arange(first, first + own, device=DEVICE)
        expected[number % 7 == 0] = 7
        assert torch.equal(out[first : first + own], expected)
        first += own


@needs_triton
def test_triton_equals_plain_in_other_formats_and_past_the_tables() -> None:
    numbers = torch.tensor([3, 2**40, 255, 0], device=DEVICE)
    targets = torch.tensor([1, 0, -1, 3], dtype=torch.int32, device=DEVICE)
    got, expected = (torch.full((4, 32), 7.0, device=DEVICE, dtype=torch.float16) for _ in range(2))
    triton_initial_rows(got, targets, Keys(numbers), of_tables())
    plain_initial_rows(expected, targets, Keys(numbers), of_tables())
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=0)
    assert (expected[2] == 7).all()


@needs_triton
@pytest.mark.parametrize("programs", [1, 40, 4096])
@pytest.mark.parametrize("columns", [2, 16, 128])
@pytest.mark.parametrize("with_tables", [False, True])
def test_triton_finds_the_few_targets_among_many(
    monkeypatch: pytest.MonkeyPatch, columns: int, with_tables: bool, programs: int
) -> None:
    """None in the first 700, then far apart and side by side, and at the end; by programs of as many targets as in
    larger batches too."""
    monkeypatch.setattr(module, "_PROGRAMS", programs)
    named = torch.tensor([700, 1023, 1024, *range(1500, 1540), 2600, 2601], device=DEVICE)
    targets = torch.full((2602,), -1, dtype=torch.int32, device=DEVICE)
    targets[named] = torch.randperm(len(named), device=DEVICE).int()
    numbers = torch.arange(len(targets), device=DEVICE) % sum(OF_OWNER)
    of, keys = of_tables(), Keys(numbers)
    if with_tables:
        of, keys = of._replace(first_rows=torch.zeros_like(of.first_rows)), Keys(numbers, numbers.int() % 3)
    got, expected = (torch.full((len(named) + 1, 2, columns), 7.0, device=DEVICE) for _ in range(2))
    triton_initial_rows(got[:, 0], targets, keys, of, got[:, 1])
    plain_initial_rows(expected[:, 0], targets, keys, of, expected[:, 1])
    assert torch.equal(got, expected)
    assert (got[:-1] != 7).all()
    assert (got[-1] == 7).all()


@needs_triton
@pytest.mark.parametrize("columns", [0, 1, 16])
@pytest.mark.parametrize("make", [plain_initial_rows, triton_initial_rows])
def test_other_memory_of_the_same_rows_becomes_zero(make: object, columns: int) -> None:
    numbers = torch.tensor([5, 90, 7], device=DEVICE)
    targets = torch.tensor([2, 0, -1], dtype=torch.int32, device=DEVICE)
    memory, plain = torch.full((4, 16 + columns), 7.0, device=DEVICE), torch.full((4, 16), 7.0, device=DEVICE)
    make(memory[:, :16], targets, Keys(numbers), of_tables(), memory[:, 16:])  # type: ignore[operator]
    make(plain, targets, Keys(numbers), of_tables())  # type: ignore[operator]
    assert torch.equal(memory[:, :16], plain)
    assert (memory[[0, 2], 16:] == 0).all()
    assert (memory[[1, 3], 16:] == 7).all()


@needs_triton
@pytest.mark.parametrize("make", [plain_initial_rows, triton_initial_rows])
def test_rows_may_stand_apart(make: object) -> None:
    """As where each row's optimizer state follows it, which stays as it is."""
    numbers = torch.tensor([5, 90, 7], device=DEVICE)
    targets = torch.tensor([2, 0, -1], dtype=torch.int32, device=DEVICE)
    memory, expected = torch.full((4, 2, 16), 7.0, device=DEVICE), torch.full((4, 16), 7.0, device=DEVICE)
    make(memory[:, 0], targets, Keys(numbers), of_tables())  # type: ignore[operator]
    plain_initial_rows(expected, targets, Keys(numbers), of_tables())
    assert torch.equal(memory[:, 0], expected)
    assert (expected[[0, 2]] != 7).all()
    assert (memory[:, 1] == 7).all()


def test_columns_that_no_block_covers_are_refused() -> None:
    targets = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="power of two"):
        initial_rows(torch.zeros(2, 12), targets, Keys(targets), of_tables())


# Raw ids of tables

ANY = [3, -1, 3 + (1 << 32), 3 + (1 << 43), 3 + (1 << 44), 3 + (1 << 62), -(1 << 63), (1 << 63) - 1]


@needs_triton
@pytest.mark.parametrize("make", [plain_initial_rows, triton_initial_rows])
def test_rows_of_raw_ids_are_those_of_tables_of_any_size(make: object) -> None:
    """Below 2^43, beyond which the counters of a table are not signed."""
    of = RowsOfTables(torch.zeros(3, dtype=torch.int64, device=DEVICE), *of_tables()[1:4], 0, 1)
    ids, targets = torch.tensor(ANY, device=DEVICE), torch.arange(len(ANY), dtype=torch.int32, device=DEVICE)
    for table, rows in enumerate(ROWS):
        out, expected = (torch.full((len(ANY), 32), 7.0, device=DEVICE) for _ in range(2))
        keys = Keys(ids, torch.full_like(targets, table))
        make(out, torch.where(ids == -1, -1, targets), keys, of)  # type: ignore[operator]
        for row in (0, 2):
            declared = {"seed": SEED, "table": table, "num_embeddings": rows}
            fill_initial_weights(expected[row : row + 1], **declared, row_offset=ANY[row])
            assert torch.equal(out[row], expected[row])
        assert (out[1] == 7).all()
        assert len(out.unique(dim=0)) == len(ANY), "all differ, also in the upper bits alone"
        assert 0.8 < out[2:].abs().max() * rows**0.5 <= 1


@needs_triton
def test_triton_equals_plain_for_any_int64() -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (300,), generator=generator).to(DEVICE)
    tables = torch.randint(3, (300,), generator=generator, dtype=torch.int32).to(DEVICE)
    of = RowsOfTables(torch.zeros(3, dtype=torch.int64, device=DEVICE), *of_tables()[1:4], 0, 1)
    got, expected = torch.zeros(2, 300, 16, device=DEVICE).unbind()
    targets = torch.randperm(300, generator=generator).int().to(DEVICE)
    triton_initial_rows(got, targets, Keys(ids, tables), of)
    plain_initial_rows(expected, targets, Keys(ids, tables), of)
    assert torch.equal(got, expected)
    assert len(got.unique(dim=0)) == 300
