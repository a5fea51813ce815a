"""Fingerprints of a data set's files, which distinguish them from other files of the same names."""

from dlrm_bench.dlrm.data.checksums import sample_checksum
from dlrm_bench.dlrm.data.dataset import FileContent
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dcnv2.data.dataset import file_names
from dlrm_bench.dlrm.dcnv2.data.manifest import read_manifest


def data_content(data: DataConfig) -> dict[str, FileContent]:
    """Returns the fingerprints of the files that a run reads; without a manifest, reads some blocks of each."""
    if data.source == "random":
        return {}
    assert data.path is not None
    manifest = read_manifest(data.path)
    content: dict[str, FileContent] = {}
    for name in file_names(data, data.path):
        known = manifest.files.get(name) if manifest is not None else None
        if known is not None:
            content[name] = {"sample": known.sample, "blake2b": known.blake2b}
        else:
            content[name] = {"sample": sample_checksum(data.path / name), "blake2b": None}
    return content
