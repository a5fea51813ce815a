"""The values of --table-memory, and the rows and bytes that follow from them."""

import pytest

from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory


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
    assert TableMemory.parse("0.5").device_rows(101, 1024) == 50
    assert TableMemory.parse("1").device_rows(101, 1024) == 101
    assert TableMemory.parse("1GB").device_rows(2_000_000, 1024) == 976_562
    assert TableMemory.parse("1GB").device_rows(1000, 1024) == 1000


def test_too_few_rows_are_refused_with_a_share_that_works() -> None:
    TableMemory.parse("0.02").check_rows(0, 100, 1024)
    with pytest.raises(ValueError, match=r"--table-memory leaves rank 3 1 of 100 .* at least 0\.02"):
        TableMemory.parse("0.019").check_rows(3, 100, 1024)


def test_capacity_is_what_both_tiers_hold() -> None:
    assert TableMemory.parse("0.5").capacity(100, 1000) == 200
    assert TableMemory.parse("0.5").capacity(1000, 100) == 200
    assert TableMemory.parse("1").capacity(1000, 0) == 1000
    assert TableMemory.parse("60GB").capacity(140 * 10**9, 128 * 10**9) == 188 * 10**9
    assert TableMemory.parse("60GB").capacity(40 * 10**9, 128 * 10**9) == 168 * 10**9
