"""Cross-cutting: peak memory of preprocessing against the rows of a day; small working sets show either grow."""

import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_bench.dlrm.dcnv2.data.planted import PlantedConfig, generate

ROWS = (30_000, 120_000)
MEASURED = """
import sys
from dlrm_bench.dlrm.dcnv2.data import permutation
from dlrm_bench.dlrm.dcnv2.data import preprocess_job
from dlrm_bench.dlrm.dcnv2.data import raw_tsv
from dlrm_bench.dlrm.dcnv2.data import shuffled_rows
from dlrm_bench.dlrm.dcnv2.data.preprocess import main
raw_tsv.BLOCK_BYTES, permutation.BLOCK_ROWS, preprocess_job.ROWS_AT_ONCE = 1 << 20, 1 << 13, 1 << 13
shuffled_rows.BUCKET_ROWS = preprocess_job.BUCKET_ROWS = 1 << 13
assert main(sys.argv[1:]) == 0
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(line.split()[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of peak memory")
def test_peak_memory_does_not_grow_with_the_rows_of_a_day(tmp_path: Path) -> None:
    peak_kb = []
    for rows in ROWS:
        raw, out = tmp_path / f"raw_{rows}", tmp_path / f"out_{rows}"
        generate(PlantedConfig(path=raw, raw="tsv", days=3, samples_per_day=rows))
        command = [sys.executable, "-c", MEASURED, str(raw), str(out), "--preset", "smoke"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        peak_kb.append(int(done.stdout.split()[-1]))
    # A day's parsed rows alone would take 160 bytes each, 14 MB more of them.
    assert peak_kb[1] - peak_kb[0] < 7000, peak_kb
