"""The reference's cache of events, mapped for reading: hstu_cache_L4086/ and what stands beside it.

A folder of data holds `processed_5b/hstu_cache_L4086/` (the name's end is the limit of histories) and
`shared_metadata/{artist,album}_item_mapping.parquet`, as MLCommons' download and the reference's preprocessing leave
them. The cache is 1-D .npy files: one column an entry of COLUMNS, of all events, sorted by user and then by time;
`user_start` and `user_end`, by uid, -1 where a user has no events; `unique_uids`; `positions_*`, the events that are
anchors, ascending, and `anchor_ts_*`, their times. `_READY`, empty, is written last. `store_meta.json` counts users and
events; where limits are not the benchmark's it also has `limits`, which the reference's reader passes over.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.npy import COPY_AGAIN
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits

READY = "_READY"
META = "store_meta.json"
COLUMNS = {
    "flat_uid": np.int64,
    "flat_item_ids": np.int64,
    "flat_timestamps": np.int64,
    "flat_event_types": np.int64,
    "flat_played_ratio": np.float32,
    "flat_is_listen_plus": np.bool_,
    "flat_is_like": np.bool_,
    "flat_is_skip": np.bool_,
    "flat_is_organic": np.int8,
}
"""Files with one value an event."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cache:
    """N events of all users, and A anchors among them, as memory maps."""

    folder: Path
    limits: Limits
    uid: NDArray[np.int64]
    """User of each event, [N]; so are the following columns."""
    item: NDArray[np.int64]
    timestamp: NDArray[np.int64]
    """Seconds."""
    event_type: NDArray[np.int64]
    played_ratio: NDArray[np.float32]
    """Percent of the track; 0 where it is no listen."""
    is_listen_plus: NDArray[np.bool_]
    is_like: NDArray[np.bool_]
    is_skip: NDArray[np.bool_]
    is_organic: NDArray[np.int8]
    user_start: NDArray[np.int64]
    """First event of each uid; in user_end, the one after its last."""
    user_end: NDArray[np.int64]
    unique_uids: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Event of each anchor, ascending, [A]."""
    anchor_timestamp: NDArray[np.int64]
    """Time of each anchor, [A]."""

    def __len__(self) -> int:
        return len(self.uid)

    @classmethod
    def open(cls, folder: Path, limits: Limits | None = None) -> "Cache":
        """Map a cache's files; their bytes are read when they are used.

        limits: those that the run wants, by default those of the cache. ValueError names the file, and what to do, if
        any is missing, damaged, not as long as the others, or of other limits.
        """
        if not (folder / READY).is_file():
            raise ValueError(f"{folder} has no {READY}: it is no cache of events, or half written: {COPY_AGAIN}")
        found = read_limits(folder)
        if limits is not None and limits != found:
            raise ValueError(f"{folder} was made for {found}, not for {limits}: generate or preprocess it for these")
        columns = [map_column(folder / f"{name}.npy", dtype) for name, dtype in COLUMNS.items()]
        users = [map_column(folder / f"{name}.npy", np.int64) for name in ("user_start", "user_end", "unique_uids")]
        anchors = [
            map_column(folder / f"{name}_{found.anchors_name}.npy", np.int64) for name in ("positions", "anchor_ts")
        ]
        events = int(_meta(folder)["total_events"])
        for name, column in zip(COLUMNS, columns, strict=True):
            if len(column) != events:
                raise ValueError(f"{folder / name}.npy has {len(column)} events, {META} {events}: {COPY_AGAIN}")
        for pair, names in ((users[:2], "user_start and user_end"), (anchors, "positions and anchor_ts")):
            if len(pair[0]) != len(pair[1]):
                raise ValueError(f"{folder}: {names} have {len(pair[0])} and {len(pair[1])} entries: {COPY_AGAIN}")
        return cls.of_columns(folder, found, (*columns, *users, *anchors))

    @classmethod
    def of_columns(cls, folder: Path, limits: Limits, columns: Sequence[NDArray[Any]]) -> "Cache":
        """Returns a cache of these columns, in the order of the fields: those of COLUMNS, and five of int64."""
        names = [name for name in cls.__dataclass_fields__ if name not in ("folder", "limits")]
        return cls(folder=folder, limits=limits, **dict(zip(names, columns, strict=True)))


def complete_caches(root: Path) -> list[Path]:
    """Returns the folders of all finished caches under a folder of data, sorted."""
    return sorted(path.parent for path in root.glob(f"processed*/hstu_cache_L*/{READY}"))


def find_cache(root: Path) -> Path:
    """Returns the cache's folder under a folder of data; ValueError unless there is exactly one."""
    found = complete_caches(root)
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        fix = "keep one of them" if found else "dlrm-bench data generate and data preprocess write one: name its folder"
        raise ValueError(f"{root} should hold one finished cache, processed_5b/hstu_cache_L4086: found {names}; {fix}")
    return found[0]


def read_limits(folder: Path) -> Limits:
    """Limits that a cache was made for: those of its meta file, else the benchmark's with the length of its name."""
    known = _meta(folder).get("limits")
    if known is None:
        history = folder.name.removeprefix("hstu_cache_L")
        if not history.isdigit():
            raise ValueError(f"{folder}: the name does not end in a history's length, as hstu_cache_L4086 does")
        return Limits(history=int(history), min_history=int(history))
    try:
        return Limits(**known)
    except TypeError as error:
        raise ValueError(f"{folder / META}: unknown limits ({error}): generate the data again") from error


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {COPY_AGAIN}") from error
    if not isinstance(meta, dict) or not {"num_users", "total_events"} <= meta.keys():
        raise ValueError(f"{path} does not count users and events: {COPY_AGAIN}")
    return meta


def map_column(path: Path, dtype: Any, dimensions: int = 1) -> NDArray[Any]:
    """Returns a .npy file as a read-only map, shared by all processes of the host; ValueError names a defect of the
    file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be mapped ({error}): {COPY_AGAIN}") from error
    except (SyntaxError, TokenError) as error:  # numpy lets these of Python's own parser through
        raise ValueError(f"{path} cannot be mapped (its header is damaged): {COPY_AGAIN}") from error
    if array.dtype != dtype or array.ndim != dimensions:
        raise ValueError(
            f"{path}: expected {np.dtype(dtype)} of {dimensions} dimension(s), found {array.dtype} {array.shape}: "
            f"{COPY_AGAIN}"
        )
    return array.view(np.ndarray)
