"""Flags of launch/dlrm.py among the words of another command."""

import pytest

from dlrm_bench.bench.forwarded import preset_name, split_forwarded, take_flag


@pytest.mark.parametrize("words", [["a", "--preset", "x", "b"], ["--preset=x", "a", "b"], ["a", "b", "--preset", "x"]])
def test_a_flag_is_found_wherever_it_stands(words: list[str]) -> None:
    assert take_flag(words, "--preset") == ("x", ["a", "b"])


@pytest.mark.parametrize(
    ("given", "value", "left"),
    [
        ("a --run-id 3 b", "3", "a b"),
        ("a --run-id=3 b --run-ids x", "3", "a b --run-ids x"),
        ("--run_id x c", "x", "c"),
        ("--run-id 1 --run_id=2 --data.path run-id", "2", "--data.path run-id"),
        ("a --run-id", None, "a"),
        ("a", None, "a"),
    ],
)
def test_a_flag_has_its_last_value_and_is_left_out(given: str, value: str | None, left: str) -> None:
    assert take_flag(given.split(), "--run-id") == (value, left.split())


def test_a_preset_that_is_given_twice_is_the_one_that_runs() -> None:
    """launch/dlrm.py takes the last one."""
    assert preset_name(["--preset", "launch-bound", "--seed", "1", "--preset=smoke-dlrmv4"]) == "smoke-dlrmv4"
    assert preset_name(["--seed", "1"]) == "smoke"


@pytest.mark.parametrize(
    ("words", "own", "passed_on"),
    [
        ("a --preset x --y", "a", "--preset x --y"),
        ("a --preset=x -- y", "a", "--preset=x -- y"),
        ("a -- --preset x", "a", "--preset x"),
        ("a b", "a b", ""),
    ],
)
def test_flags_are_passed_on_from_the_preset_on(words: str, own: str, passed_on: str) -> None:
    assert split_forwarded(words.split()) == (own.split(), passed_on.split())
