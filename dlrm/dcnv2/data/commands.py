"""dlrm-bench data for DLRM-DCNv2: makes, preprocesses, checks and times day files."""

from collections.abc import Sequence


def main(what: str, preset: str | None, flags: Sequence[str]) -> int:
    """Runs one command on its flags; returns the exit status. preset: whose tables the data fit, where one is named."""
    if what == "generate":
        from dlrm_bench.dlrm.dcnv2.data.planted import main as run
    elif what == "fill":
        from dlrm_bench.dlrm.dcnv2.data.fill import main as run
    elif what == "speed":
        from dlrm_bench.dlrm.dcnv2.data.speed import main as run
    elif what == "preprocess":
        from dlrm_bench.dlrm.dcnv2.data.preprocess import main as run
    else:
        from dlrm_bench.dlrm.dcnv2.data.check import main as run
    return run([*flags, "--preset", preset] if preset is not None else flags)
