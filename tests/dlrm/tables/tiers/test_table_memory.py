"""The values of --table-memory, and the rows and bytes that follow from them."""

import re
from dataclasses import replace

import pytest

from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import DeviceRows, TableMemory


def test_a_value_is_a_share_of_rows_or_gigabytes() -> None:
    assert TableMemory.parse("0.5") == TableMemory(share=0.5)
    assert TableMemory.parse("1") == TableMemory(share=1.0)
    assert TableMemory.parse("60GB") == TableMemory(device_bytes=60_000_000_000)
    assert TableMemory.parse(" 0.25 GB") == TableMemory(device_bytes=250_000_000)


@pytest.mark.parametrize("text", ["0", "-0.5", "1.5", "60", "60MB", "half", "", "nan", "inf", "infGB", "0GB", "GB"])
def test_other_values_are_refused_by_the_name_of_the_flag(text: str) -> None:
    with pytest.raises(ValueError, match=r"--table-memory .* share of rows"):
        TableMemory.parse(text)


def test_rows_on_the_device() -> None:
    assert TableMemory.parse("0.5").most_rows(101, 1024) == 50
    assert TableMemory.parse("1").most_rows(101, 1024) == 101
    assert TableMemory.parse("1GB").most_rows(2_000_000, 1024) == 976_562
    assert TableMemory.parse("1GB").most_rows(1000, 1024) == 1000


TABLES = Tables(names=("a", "b", "c", "d"), rows=(100, 60, 40, 1), columns=128, hot=(1, 1, 1, 1))


def shards(*tables: int) -> list[Shard]:
    return [Shard(0, table, 0, 128) for table in tables]


def test_too_few_rows_are_refused_with_a_share_that_works() -> None:
    TableMemory.parse("0.02").checked_rows(0, shards(0), TABLES, 1024)
    with pytest.raises(
        ValueError, match=r"--table-memory leaves rank 3 1 of 100 .* hold at least 2: .* at least 0\.02"
    ):
        TableMemory.parse("0.019").checked_rows(3, shards(0), TABLES, 1024)


def test_tables_with_a_share_have_exactly_that_and_the_others_the_rest() -> None:
    memory = TableMemory(share=0.5, shares={0: 0.25, 2: 1.0})
    held = memory.checked_rows(0, shards(0, 1, 2, 3), TABLES, 1024)
    assert held == DeviceRows(of_shards=(25, None, 40, None), shared=35, lacking=0)
    assert held.total == 100
    # Two halves of a table's columns are two tables to a rank; what the others do not need stays empty.
    halves = [Shard(0, 0, column, 64) for column in (0, 64)]
    held = memory.checked_rows(0, [*halves, *shards(3)], TABLES, 512)
    assert held == DeviceRows(of_shards=(25, 25, None), shared=1, lacking=0)
    none = TableMemory(device_bytes=61 * 1024, shares={0: 0.0, 1: 1.0})
    assert none.checked_rows(0, shards(0, 1, 3), TABLES, 1024).of_shards == (0, 60, None)
    assert none.checked_rows(0, shards(0), TABLES, 1024).total == 0, "a table may be in host memory alone"


@pytest.mark.parametrize(
    ("memory", "held", "said"),
    [
        (
            TableMemory(share=0.5, shares={0: 1.0}),
            (0, 1),
            r"0 80 of 160 table rows .* at least 102, by --constraints a=",
        ),
        (
            TableMemory(device_bytes=61 * 1024, shares={1: 1.0, 2: 0.5}),
            (1, 2),
            r"0 61 of 100 .* 80, by .* b=hbm:1 c=hbm",
        ),
        (TableMemory(share=0.5, shares={0: 0.5}), (0, 3), r"0 50 of 101 table rows .* at least 51, by"),
    ],
)
def test_shares_above_all_of_the_device_memory_are_refused_by_name(
    memory: TableMemory, held: tuple[int, ...], said: str
) -> None:
    """With a share that works."""
    with pytest.raises(ValueError, match=said) as raised:
        memory.checked_rows(0, shards(*held), TABLES, 1024)
    assert "or lower those shares" in str(raised.value)
    (share,), (gigabytes,) = (re.findall(form, str(raised.value)) for form in (r"at least (0[\d.]+)", r"or (\S+)GB"))
    for enough in (
        replace(memory, share=float(share), device_bytes=None),
        replace(memory, share=None, device_bytes=int(float(gigabytes) * 1e9)),
    ):
        assert enough.checked_rows(0, shards(*held), TABLES, 1024).lacking == 0


def test_capacity_is_what_both_tiers_hold() -> None:
    assert TableMemory.parse("0.5").capacity(100, 1000) == 200
    assert TableMemory.parse("0.5").capacity(1000, 100) == 200
    assert TableMemory.parse("1").capacity(1000, 0) == 1000
    assert TableMemory(share=1.0, shares={0: 0.0}).capacity(1000, 300) == 1300
    assert TableMemory(share=0.5, shares={0: 0.0}).capacity(1000, 300) == 600
    assert TableMemory.parse("60GB").capacity(140 * 10**9, 128 * 10**9) == 188 * 10**9
    assert TableMemory.parse("60GB").capacity(40 * 10**9, 128 * 10**9) == 168 * 10**9
