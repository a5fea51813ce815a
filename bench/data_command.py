"""dlrm-bench data: the commands of each benchmark's data."""

from collections.abc import Sequence

from dlrm_bench.bench.forwarded import take_flag
from dlrm_bench.dlrm.benchmarks import BENCHMARKS, PRESETS, preset_of


def run_data(what: str, words: Sequence[str]) -> int:
    """Passes the flags on to the data command of the benchmark that --preset names, by default of the first one;
    returns the exit status. ValueError names the known presets, or a benchmark that has no files."""
    if what == "counts":  # of any benchmark, by flags of its runs
        from dlrm_bench.bench.counts_command import run_counts

        return run_counts(words)
    preset, others = take_flag(words, "--preset")
    if what == "rows" and preset is None and {"-h", "--help"} & set(others):  # which is that of every such preset
        preset = next(
            name
            for name, (benchmark, of) in PRESETS.items()
            if benchmark.data_command is not None and not of.training.model.tables.pooled
        )
    benchmark = BENCHMARKS[0] if preset is None else preset_of(preset)[0]
    if benchmark.data_command is None:
        raise ValueError(f"--preset {preset}: {benchmark.title} has no data files: its batches are random")
    return benchmark.data_command(what, preset, others)
