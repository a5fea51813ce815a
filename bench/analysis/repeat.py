"""The flags that repeat a recorded run."""

import shlex

from dlrm_bench.bench.records.record import Record


def twin_flags(record: Record) -> tuple[list[str], int]:
    """Flags of launch/dlrm.py that repeat a record's run, and its number of processes.

    ValueError if the record's command is not one of ours on one node.
    """
    words = shlex.split(record.run["command"])
    try:
        launcher = words.index("launch/dlrm.py")
        (processes,) = (int(w.partition("=")[2]) for w in words[:launcher] if w.startswith("--nproc_per_node="))
    except ValueError:
        raise ValueError(f"{record.folder}: cannot repeat `{record.run['command']}`: give --preset and flags") from None
    if any(word.startswith("--nnodes") for word in words[:launcher]):
        raise ValueError(f"{record.folder} is a run on several nodes: its twin runs on one; give --preset and flags")
    return words[launcher + 1 :], processes
