"""Published MLPerf results, for comparison with ours."""

from dlrm_bench.dlrm.benchmarks import BENCHMARKS

PUBLISHED = {benchmark.name: benchmark.ruleset.published for benchmark in BENCHMARKS if benchmark.ruleset is not None}
"""Published results by the benchmark's name, that of the oldest benchmark first."""
PUBLISHED_CAVEATS = {
    benchmark.name: benchmark.ruleset.published_caveats for benchmark in BENCHMARKS if benchmark.ruleset is not None
}
"""Reasons why our runs do not compare with published results, by the benchmark's name."""
