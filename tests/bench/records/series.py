"""Packs series of records into a pool for tests: python -m tests.bench.records.series RECORD [...] OUT.npz"""

import sys
from pathlib import Path

import numpy as np

from dlrm_bench.bench.records.record import read_record

if __name__ == "__main__":
    *folders, out = map(Path, sys.argv[1:])
    records = sorted(map(read_record, folders), key=lambda record: record.run["created"])
    runs = [record.latencies_ms for record in records]
    np.savez_compressed(out, **{f"run_{i:02d}": run for i, run in enumerate(runs)})
