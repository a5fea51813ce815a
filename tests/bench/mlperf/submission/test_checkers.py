"""MLPerf's checkers: their verdicts on good and bad packages, which they leave unchanged."""

import json
from pathlib import Path

import pytest

from dlrm_bench.bench.mlperf.submission import checkers
from dlrm_bench.bench.mlperf.submission.checkers import Verdict, check_package, messages
from dlrm_bench.bench.mlperf.submission.package import Package
from tests.bench.mlperf.submission.made_packages import description, made_package, published, write_log


def contents(package: Package) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in package.folder.rglob("*") if path.is_file()}


def errors(verdicts: list[Verdict]) -> dict[str, list[str]]:
    return {v.checker: [f.text for f in v.findings if f.fatal] for v in verdicts if not v.passed}


def notes(verdicts: list[Verdict]) -> list[str]:
    return [finding.text for verdict in verdicts for finding in verdict.findings if not finding.fatal]


def test_a_good_package_passes_and_stays_as_it_is(tmp_path: Path) -> None:
    """One of its runs did not converge, as the rules allow, although its AUC had reached the target."""
    package = made_package(tmp_path, epoch_num=0.75)
    write_log(package.results / "result_3.txt", seed=3, start_ms=1, status="aborted")
    before = contents(package)
    verdicts = check_package(package)
    assert errors(verdicts) == {}
    assert all(verdict.asked for verdict in verdicts)
    assert set(notes(verdicts)) == {
        "result_3.txt did not converge: it counts as the slowest run",
        "Run incomplete or did not converge. Marking as infinite.",
        "mean of 0.7500 epochs to converge; factor on the score 1.015278",
    }
    assert contents(package) == before
    assert len([verdict for verdict in verdicts if verdict.text]) == 5


def test_published_runs_pass_where_they_do_and_fail_where_the_rules_changed(tmp_path: Path) -> None:
    """Every log is compliant, and convergence that of the reference; the logs name no seed, as the rules want now."""
    package, factor = published(tmp_path, "h200_ngc24.04_merlin_hugectr")
    verdicts = check_package(package)
    found = errors(verdicts)
    assert sorted(found) == ["arrangement", "package", "system description"]
    assert "status is 'onprem', but onprem of the logs is 'Available on-premise' there" in found["arrangement"][0]
    assert found["arrangement"][1].startswith("no seed in result_0.txt, result_1.txt, ")
    assert any(text.startswith("Seed checker failed") for text in found["package"])
    assert "System description checker failed for x : " in found["system description"][0]
    assert f"mean of 0.7500 epochs to converge; factor on the score {factor:.6f}" in notes(verdicts)


def test_every_trap_at_once(tmp_path: Path) -> None:
    package = made_package(tmp_path, epoch_num=0.6)
    (package.results / "result_9.txt").unlink()
    (package.implementations / "has space.py").touch()
    write_log(package.results / "result_2.txt", seed=2, opt_adagrad_epsilon=1e-7)
    write_log(package.results / "result_5.txt", seed=6)
    package.description.write_text(json.dumps(description(host_processor_core_count=56)))
    found = errors(check_package(package))
    assert sorted(found) == ["RCP", "arrangement", "compliance", "package", "repository", "system description"]
    assert found["RCP"][0].startswith("RCP found, RCP test FAILED")
    assert [
        text
        for text in found["arrangement"]
        if "has 9 result logs, but a submission exactly 10: result_9.txt missing" in text
    ]
    assert [text for text in found["arrangement"] if "result_6.txt has the seed 6 of result_5.txt" in text]
    assert [
        text for text in found["arrangement"] if 'host_processor_core_count is 56, which is no text: write "56"' in text
    ]
    assert found["compliance"] == [
        "result_2.txt: CHECK for 'opt_adagrad_epsilon' failed in line 14: failed test:  v['value'] == 1e-8"
    ]
    assert found["package"][0].startswith("the checker crashed: TypeError")
    assert found["system description"] == found["package"][:1]
    assert found["repository"][0].startswith("Files with git-unfriendly name: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("INFO - a\nWARNING -  b\n  more\nERROR - c\n", [("INFO", "a"), ("WARNING", "b\n  more"), ("ERROR", "c")]),
        (
            "usage: x\nx: error: invalid choice",
            [("CRASH", "the checker refused its arguments: x: error: invalid choice")],
        ),
        (
            "INFO - a\nTraceback (most recent call last)\n  in f\nKeyError: None\n",
            [
                ("INFO", "a\nTraceback (most recent call last)\n  in f\nKeyError: None"),
                ("CRASH", "the checker crashed: KeyError: None"),
            ],
        ),
    ],
)
def test_messages(text: str, expected: list[tuple[str, str]]) -> None:
    assert messages(text) == expected


SUCCESS = "INFO - PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !\n"
CHECKED = "INFO - Running compliance on file: x\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHECKED * 10 + SUCCESS, []),
        ("WARNING -  Skipping benchmark: dlrm_dcnv2\n" + SUCCESS, ["the checker read 0 of 10 logs"]),
        (CHECKED * 9 + SUCCESS, ["the checker read 9 of 10 logs"]),
        (CHECKED * 10, ["the checker did not end with SUCCESS"]),
        (CHECKED * 10 + "ERROR - bad\n" + SUCCESS, ["bad"]),
    ],
)
def test_the_package_checkers_words_count(text: str, expected: list[str]) -> None:
    """It ends with status 0 in all these cases, and with SUCCESS where it skipped everything."""
    verdict = checkers._packaged(text, "dlrm_dcnv2", 10, pinned=())
    assert [finding.text for finding in verdict.findings if finding.fatal] == expected
