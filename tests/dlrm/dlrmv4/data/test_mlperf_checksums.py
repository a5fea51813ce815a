"""Of MLPerf's files, two are small enough to be made from counts alone: the published checksums are theirs."""

import hashlib
import json
from pathlib import Path

import numpy as np

from dlrm_bench.dlrm.dlrmv4.data.cache_writer import ColumnWriter
from dlrm_bench.dlrm.dlrmv4.data.limits import Rows
from dlrm_bench.dlrm.dlrmv4.data.mlperf_checksums import EVENTS, SHA256


def test_the_meta_file_counts_a_million_users_and_these_events():
    meta = json.dumps({"num_users": Rows().uid - 1, "total_events": EVENTS})
    assert hashlib.sha256(meta.encode()).hexdigest() == SHA256["store_meta.json"]


def test_users_are_one_to_a_million_in_the_form_that_the_writer_writes(tmp_path: Path):
    writer = ColumnWriter(tmp_path / "unique_uids.npy", np.int64)
    writer.append(np.arange(1, Rows().uid))
    writer.close()
    assert hashlib.sha256((tmp_path / "unique_uids.npy").read_bytes()).hexdigest() == SHA256["unique_uids.npy"]
