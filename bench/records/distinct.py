"""Detection of copies: a run counts once, however many folders hold its record."""

import hashlib
from collections.abc import Sequence

from dlrm_bench.bench.records.record import Record


def record_key(record: Record) -> tuple[str, str, str]:
    """Returns the run's id, the time of its end, and a digest of its latencies and losses.

    Only copies have equal keys. The id alone does not identify a run: a ladder's runs are named by round and rung.
    """
    digest = hashlib.sha256(record.iterations_ms.tobytes() + record.losses.tobytes()).hexdigest()
    return record.run["id"], record.run["created"], digest


def distinct(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Returns the records without copies, in order, and a sentence on each copy that names both folders."""
    kept: dict[tuple[str, str, str], Record] = {}
    copies = []
    for record in records:
        first = kept.setdefault(record_key(record), record)
        if first is not record:
            copies.append(f"{record.folder} holds the same run as {first.folder}, and counts once")
    return list(kept.values()), copies
