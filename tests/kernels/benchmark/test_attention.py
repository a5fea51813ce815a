"""Attention's benchmark: its lengths, its intervals, and on a GPU its table."""

import math
import statistics

import pytest

from dlrm_bench.kernels.benchmark import attention


def test_lengths_are_those_of_early_batches() -> None:
    lengths = attention.jagged_lengths(20_000)
    assert statistics.mean(lengths) == pytest.approx(2082, rel=0.02)
    assert math.sqrt(statistics.mean(length**2 for length in lengths)) == pytest.approx(2302, rel=0.02)
    assert min(lengths) >= 1
    assert max(lengths) <= attention.LONGEST


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (2, 0), (5, 0), (6, 0), (8, 0), (9, 1), (15, 3), (20, 5)])
def test_interval_is_the_narrowest_of_order_statistics_with_95_percent(count: int, rank: int) -> None:
    """Ranks by the binomial distribution, as in tables of the sign test; below six values there are none."""
    values = [float(i) for i in range(count)]
    assert attention.median_interval(values[::-1]) == (rank, count - 1 - rank)


@pytest.mark.gpu
def test_table_has_a_line_for_each_shape_direction_and_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "SAMPLES", 2)
    monkeypatch.setattr(attention, "ROUNDS", 3)
    attention.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [tuple(line[:3]) for line in lines] == [
        (shape, direction, kernels)
        for shape in ("2048", "4096", "jagged")
        for direction in ("forward", "backward")
        for kernels in ("triton", "chosen")
    ]
    assert all(float(line[7]) > 0 for line in lines)


def test_published_figures_stand_beside_their_lengths_and_directions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of 10^9 operations in 100 us, 10 TFLOP/s, by both kernels."""
    runs = {direction: (1e9, {"triton": list, "chosen": list}) for direction in ("forward", "backward")}
    monkeypatch.setattr(attention, "attention_runs", lambda _: runs)
    monkeypatch.setattr(attention, "time_in_turn", lambda of, _: {name: [100.0] for name in of})
    attention.main()
    said = capsys.readouterr().out
    assert "CUTLASS on an H100" in said
    lines = [line.split() for line in said.splitlines()[3:]]
    assert all(line[2] in ("triton", "chosen") for line in lines)
    of_chosen = {tuple(line[:2]): line[9:] for line in lines if line[2] == "chosen"}
    assert of_chosen == {
        ("2048", "forward"): ["466"],
        ("2048", "backward"): ["386"],
        ("4096", "forward"): ["508"],
        ("4096", "backward"): ["433"],
        ("jagged", "forward"): [],
        ("jagged", "backward"): [],
    }
