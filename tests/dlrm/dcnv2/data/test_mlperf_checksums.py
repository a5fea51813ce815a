import re

from dlrm_bench.dlrm.dcnv2.data.check import DAY_FILE, MLPERF_DAY_SAMPLES
from dlrm_bench.dlrm.dcnv2.data.mlperf_checksums import MLPERF_MD5


def test_every_file_has_a_sum_of_its_own() -> None:
    assert len(MLPERF_MD5) == len(set(MLPERF_MD5.values())) == 4 * len(MLPERF_DAY_SAMPLES)
    assert all(DAY_FILE.fullmatch(name) for name in MLPERF_MD5)
    assert all(re.fullmatch("[0-9a-f]{32}", md5) for md5 in MLPERF_MD5.values())


def test_some_of_them() -> None:
    """Some lines, as md5sum prints them in the reference's lists."""
    assert MLPERF_MD5["day_0_dense.npy"] == "427113b0c4d85a8fceaf793457302067"
    assert MLPERF_MD5["day_23_sparse.npy"] == "0c33f1562529cc3bca7f3708e2be63c9"
    assert MLPERF_MD5["day_10_sparse_multi_hot.npz"] == "eb048fc4fbd7ffa7932b81a523fe5a39"
