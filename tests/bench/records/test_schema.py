"""The form of run.json."""

from dlrm_bench.bench.records.schema import Profile, RunRecord


def test_a_profile_is_a_part_of_a_record() -> None:
    names = list(RunRecord.__annotations__)
    begin = names.index("host")
    assert names[begin : begin + len(Profile.__annotations__)] == list(Profile.__annotations__)
