"""The data of DLRM-DCNv2: random batches, or MLPerf's day files."""

from collections.abc import Sequence
from pathlib import Path

from dlrm_bench.dlrm.data.checksums import changed_files
from dlrm_bench.dlrm.data.dataset import Dataset
from dlrm_bench.dlrm.data.paths import why_not
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.dcnv2.data import criteo
from dlrm_bench.dlrm.dcnv2.data.criteo import Day, MultiHotDay, OneHotDay
from dlrm_bench.dlrm.dcnv2.data.expansion import open_expansion_tables
from dlrm_bench.dlrm.dcnv2.data.file_batches import FileBatches
from dlrm_bench.dlrm.dcnv2.data.manifest import MARKER, read_manifest
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset


def open_dataset(data: DataConfig, model: ModelConfig, seed: int) -> Dataset:
    """Opens and checks the data set of `data`; ValueError names the bad file or flag. seed: for random batches."""
    return RandomDataset(data, model, seed) if data.source == "random" else FileDataset(data, model)


class FileDataset:
    """Days 0 to train_days - 1 train; the first half, (N + 1) // 2 samples, of day train_days evaluates."""

    def __init__(self, data: DataConfig, model: ModelConfig) -> None:
        assert data.path is not None
        self._model = model
        self.best_auc = _check_directory(data.path, data, model)
        days = _open_days(data, data.path, model)
        self._train_parts = [(day, day.num_samples) for day in days[:-1]]
        self._eval_parts = [(days[-1], (days[-1].num_samples + 1) // 2)]
        self.train_samples: int | None = sum(samples for _, samples in self._train_parts)
        self.eval_samples = self._eval_parts[0][1]

    def train_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> FileBatches:
        """See Dataset; ValueError if the samples do not fill one global batch."""
        assert self.train_samples is not None
        batches = self.train_samples // (world_size * local_batch_size)
        if batches == 0:
            raise ValueError(
                f"the {self.train_samples} training samples do not fill one global batch of {world_size} * "
                f"{local_batch_size}: lower --local-batch-size"
            )
        return FileBatches(self._train_parts, self._model, range(batches), rank, world_size, local_batch_size, pin)

    def eval_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> FileBatches:
        """See Dataset."""
        batches = -(-self.eval_samples // (world_size * local_batch_size))
        return FileBatches(self._eval_parts, self._model, range(batches), rank, world_size, local_batch_size, pin)


def _check_directory(path: Path, data: DataConfig, model: ModelConfig) -> float | None:
    """Returns the best AUC in the directory's manifest for this evaluation day; None without a manifest."""
    if not path.is_dir():
        raise ValueError(
            f"--data.path {path} {why_not(path)}: generate a small data set with "
            f"'dlrm-bench data generate --preset smoke {path}', or name the directory of "
            "MLPerf's day files"
        )
    if (path / MARKER).exists():
        raise ValueError(
            f"{path} holds an unfinished data set: its generator is still running, or was interrupted; in that case, "
            "run the same 'dlrm-bench data generate' or 'dlrm-bench data preprocess' again"
        )
    manifest = read_manifest(path)
    if manifest is None:
        return None
    manifest.check_model(path, model, data.source == "one_hot")
    findings = list(changed_files(path, manifest.files, file_names(data, path)))
    if findings:
        more = f" (one of {len(findings)} such files)" if len(findings) > 1 else ""
        raise ValueError(f"{findings[0]}{more}; 'dlrm-bench data check {path}' checks every byte")
    return manifest.best_auc if data.train_days == len(manifest.samples_per_day) - 1 else None


def file_names(data: DataConfig, path: Path) -> list[str]:
    """Returns the names of the files that a run reads; empty for random batches."""
    ids_file = criteo.multi_hot_file if data.source == "multi_hot" else criteo.one_hot_file
    kinds = (criteo.dense_file, criteo.labels_file, ids_file)
    return [kind(path, day).name for day in range(data.train_days + 1) for kind in kinds]


def _open_days(data: DataConfig, path: Path, model: ModelConfig) -> Sequence[Day]:
    days = range(data.train_days + 1)
    if data.source == "multi_hot":
        return [MultiHotDay(path, day, model) for day in days]
    one_hot_days = [OneHotDay(path, day, model) for day in days]
    tables = open_expansion_tables(path, model.rows, model.multi_hot_sizes)
    for one_hot_day in one_hot_days:
        one_hot_day.tables = tables
    return one_hot_days
