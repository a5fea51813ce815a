"""What a generated data set says about itself, in `manifest.json` beside the day files."""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dlrm_bench.dlrm.config import ModelConfig

MANIFEST = "manifest.json"
MARKER = "generating.lock"
"""Stands in the directory from before the first day file until after the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Written last, so day files beside a manifest are complete."""

    parameters: dict[str, Any]
    """What the generator was asked for; equal parameters give equal files."""
    rows: list[int]
    """Rows of each table: ids lie below."""
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
    best_auc: float
    """AUC of the true probabilities on the evaluation samples; more than luck lets no model have."""

    def write(self, directory: Path) -> None:
        """Appears complete or not at all."""
        partial = directory / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(partial, directory / MANIFEST)

    def check_model(self, directory: Path, model: ModelConfig) -> None:
        """ValueError if the data set was made for tables or features other than the model's."""
        pairs = (
            ("table rows", "--model.num-embeddings, --model.table-scale", self.rows, list(model.rows)),
            ("multi-hot sizes", "--model.multi-hot-sizes", self.multi_hot_sizes, list(model.multi_hot_sizes)),
            ("dense features", "--model.dense-in-features", [self.dense_in_features], [model.dense_in_features]),
        )
        for what, flags, ours, theirs in pairs:
            if ours != theirs:
                raise ValueError(
                    f"{directory / MANIFEST}: {what} differ: the data has {_difference(ours, theirs)} (the model): "
                    f"change {flags}, or generate data for this model under another --data.path"
                )


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory, None without one; ValueError if it cannot be understood."""
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return Manifest(**{field.name: content[field.name] for field in fields(Manifest)})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: is not a manifest of this program ({error!r}): choose another directory, or remove this file and "
            "the day files beside it"
        ) from error


def _difference(ours: list[int], theirs: list[int]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} features instead of {len(theirs)}"
    feature = next(f for f, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return f"{ours[feature]} for feature {feature} instead of {theirs[feature]}"
