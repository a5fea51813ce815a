"""Several checkers in one process: what one of them leaves behind does not reach the next."""

from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance

from dlrm_bench.bench.mlperf.submission.checkers import run_checkers
from tests.bench.mlperf.submission.made_packages import write_log


def test_a_crash_and_a_refusal_reach_no_other_checker(tmp_path: Path) -> None:
    write_log(tmp_path / "log.txt")
    good = ("mlperf_logging.compliance_checker", ["--ruleset", "6.0.0", "log.txt"])
    crash = ("mlperf_logging.compliance_checker", ["--ruleset", "6.0.0", "nowhere.txt"])
    refused = ("mlperf_logging.rcp_checker", ["--nonsense"])
    texts = run_checkers([good, crash, refused, good], tmp_path)
    assert "INFO - SUCCESS" in texts[0]
    assert "FileNotFoundError" in texts[1]
    assert "unrecognized arguments" in texts[2] or "the following arguments are required" in texts[2]
    assert texts[3] == texts[0]
    assert mlp_compliance.enqueued_configs == []
