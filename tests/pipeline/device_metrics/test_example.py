"""Cross-cutting: examples/device_metrics.py runs on two ranks, and shows the same values of both kinds of metrics."""

import re
from pathlib import Path

from tests.launched import fork, run_script, wait

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "device_metrics.py"


def test_the_example_shows_the_same_values(tmp_path: Path) -> None:
    ended = wait(fork(2, tmp_path, run_script, EXAMPLE, ()), tmp_path)
    assert ended.statuses == [0, 0], ended.outputs
    printed = "".join(ended.outputs)
    assert len(re.findall(r"^  \S+\|(?:lifetime|window)_", printed, re.MULTILINE)) == 3 * 2 * (5 * 2 + 2 + 1)
    (largest,) = re.findall(r"largest relative difference (\S+)", printed)
    assert float(largest) < 1e-12
