"""The description of a data set made by this program, in `manifest.json` beside the day files."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from dlrm_bench.dlrm.data.checksums import Checksum
from dlrm_bench.dlrm.data.lock import locked
from dlrm_bench.dlrm.dcnv2.config import ModelConfig

MANIFEST = "manifest.json"
MARKER = "generating.lock"
"""Exists in the directory from before the first day file is written until after the manifest is."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, an exhausted quota, and a file size limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A data set's manifest; written last, so day files beside it are complete."""

    parameters: dict[str, Any]
    """Parameters of the generator; equal parameters give equal files."""
    rows: list[int]
    """Number of rows of each table; all ids are smaller."""
    multi_hot_sizes: list[int]
    """Ids per sample of each feature."""
    dense_in_features: int
    """Dense features per sample."""
    samples_per_day: list[int]
    """Samples of each day; the last day evaluates."""
    train_samples: int
    """Samples of all days but the last."""
    eval_samples: int
    """Samples of the last day's first half."""
    best_auc: float | None
    """AUC of the true probabilities on the evaluation samples, which a model exceeds only by chance; None if
    unknown."""
    files: dict[str, Checksum] = field(default_factory=dict)
    """The day files by name; empty in manifests older than the checksums."""

    @property
    def raw_ids(self) -> bool:
        """Whether ids are raw, any int64; `rows` are then the numbers of distinct ids that the generator chose from."""
        return bool(self.parameters.get("raw_ids"))

    def write(self, directory: Path) -> None:
        """Writes the manifest atomically."""
        partial = directory / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(partial, directory / MANIFEST)

    def check_model(self, directory: Path, model: ModelConfig, one_hot: bool) -> None:
        """ValueError if the data set was made for tables or features other than the model's.

        1-hot ids fit any tables, unless the best AUC depends on the tables that expand them; raw ids have none.
        """
        if self.raw_ids != model.raw_ids:
            raise ValueError(
                f"{directory / MANIFEST}: the data has "
                + ("raw ids: add --model.raw-ids" if self.raw_ids else "row numbers: leave --model.raw-ids out")
            )
        pairs = [("dense features", "--model.dense-in-features", [self.dense_in_features], [model.dense_in_features])]
        if not one_hot or self.best_auc is not None:
            rows = ("table rows", "--model.num-embeddings, --model.table-scale", self.rows, list(model.rows))
            pairs += [
                *(() if self.raw_ids else (rows,)),
                ("multi-hot sizes", "--model.multi-hot-sizes", self.multi_hot_sizes, list(model.multi_hot_sizes)),
            ]
        for what, flags, ours, theirs in pairs:
            if ours != theirs:
                raise ValueError(
                    f"{directory / MANIFEST}: {what} differ: the data has {_difference(ours, theirs)} (the model): "
                    f"change {flags}, or generate data for this model under another --data.path"
                )


def read_manifest(directory: Path) -> Manifest | None:
    """Returns the manifest of a directory, None without one; ValueError if it cannot be parsed."""
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {name: Checksum(**sums) for name, sums in content.get("files", {}).items()}
        known = {field.name: content[field.name] for field in fields(Manifest) if field.name != "files"}
        manifest = Manifest(**known, files=files)
        _check_types(manifest)
        for sums in files.values():
            _check_types(sums)
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # The error's own message about bytes that are not text would print all of them.
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else repr(error)
        raise ValueError(
            f"{path}: is not a manifest of this program ({why}): choose another directory, or remove this file and the "
            "day files beside it"
        ) from error


def require_equal(path: Path, theirs: dict[str, Any], parameters: dict[str, Any], fix: str) -> None:
    """Raises a ValueError that ends with `fix` if the data in `path` were made, or started, with other parameters."""
    for name in {**parameters, **theirs}:
        if parameters.get(name) != theirs.get(name):
            raise ValueError(
                f"{path} holds a data set made with {name} {theirs.get(name)}, not {parameters.get(name)}: {fix}"
            )


def _check_types(of: Manifest | Checksum) -> None:
    """Raises TypeError for a field of the wrong type."""
    for name, kind in get_type_hints(type(of)).items():
        value = getattr(of, name)
        if not _has_type(value, kind):
            raise TypeError(f"{name} is {value!r:.80}")


def _has_type(value: Any, kind: Any) -> bool:
    if get_origin(kind) is UnionType:
        return any(_has_type(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_has_type(item, get_args(kind)[0]) for item in value)
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Marks the directory as unfinished until the body ends without an error; ValueError if another process is writing
    to it, or the disk is full.

    If the writer is interrupted, the marker remains and warns the next writer that day files may be leftovers.
    """
    with locked(directory / MARKER):
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            free = shutil.disk_usage(directory).free / 1e9
            raise ValueError(
                f"cannot write to {directory} ({error.strerror}; {free:.1f} GB are free): make room, or choose another "
                "directory"
            ) from error
        (directory / MARKER).unlink(missing_ok=True)


def _difference(ours: list[int], theirs: list[int]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} features instead of {len(theirs)}"
    feature = next(f for f, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return f"{ours[feature]} for feature {feature} instead of {theirs[feature]}"
