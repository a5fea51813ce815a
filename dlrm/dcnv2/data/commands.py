"""`dlrm-bench data` for DLRM-DCNv2; see benchmark.DataCommand."""

from collections.abc import Sequence


def main(what: str, preset: str | None, args: Sequence[str]) -> int:
    """Passes the flags, with the preset's, to one of the commands; returns the exit status."""
    if what == "generate":
        from dlrm_bench.dlrm.dcnv2.data.planted import main as command
    elif what == "fill":
        from dlrm_bench.dlrm.dcnv2.data.fill import main as command
    elif what == "speed":
        from dlrm_bench.dlrm.dcnv2.data.speed import main as command
    elif what == "preprocess":
        from dlrm_bench.dlrm.dcnv2.data.preprocess import main as command
    elif what == "rows":
        raise ValueError(
            "dlrm-bench data rows counts the rows of DLRMv4's tables: name one of its presets, --preset mlperf-dlrmv4"
        )
    else:
        from dlrm_bench.dlrm.dcnv2.data.check import main as command
    return command([*args, *(("--preset", preset) if preset is not None else ())])
