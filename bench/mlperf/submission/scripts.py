"""The files that the rules require beside the source code: installation, data set, and repetition of a run.

training submissions: implementations/SYSTEM/ has SYSTEM_IMPLEMENTATION.json, README.md, setup.sh, init_datasets.sh and
run_and_time.sh (submission_rules.adoc, "Directory structure", Training). They may be edited: existing files are kept.
"""

import json

from dlrm_bench.bench.mlperf.submission.package import Package
from dlrm_bench.bench.records.record import RUN_JSON
from dlrm_bench.bench.records.schema import RunRecord
from dlrm_bench.dlrm.benchmarks import named

_README = """# {title} with {implementation} on {system}

The source code is in `../{implementation}`; its README.md explains the flags. On every node:

    ./setup.sh                                  # once: the pinned packages, into a virtual environment
    RAW=/raw DATA=/data ./init_datasets.sh      # once: {raw} to MLPerf's files
    SEED=0 ./run_and_time.sh                    # one run

One run is

    {command}

- Data preprocessing: `dlrm/{folder}/data/preprocess.py`, byte for byte that of the reference.
- Data traversal order: {order}; `dlrm/{folder}/data/dataset.py`.
- Model and its initialisation: `dlrm/{folder}/network.py`, `dlrm/tables/initial_weights.py`.
- Optimizer, hyperparameters, evaluation frequency: `{system}_{implementation}.json`, as the runs resolved them.
- Evaluation: exact AUC, `dlrm/data/metrics.py`, over the samples of `dlrm/{folder}/data/dataset.py`.
"""

_SETUP = """#!/usr/bin/env bash
# Installs the pinned packages and this program into a virtual environment.
set -euo pipefail
cd "$(dirname "$0")/../{implementation}"
pins=requirements/{pins}.txt
python3 -m venv venv
venv/bin/pip install $(grep -E '^(torch|setuptools)==' "$pins")
venv/bin/pip install --no-deps --requirement "$pins"
venv/bin/pip install --no-deps --no-build-isolation .
"""

_DATASETS = """#!/usr/bin/env bash
# Makes MLPerf's files in $DATA from {raw} in $RAW, and checks every byte.
set -euo pipefail
bin=$(cd "$(dirname "$0")/../{implementation}" && pwd)/venv/bin
"$bin/dlrm-bench" data preprocess {data_flags}"${{RAW:?}}" "${{DATA:?}}"
"$bin/dlrm-bench" data check {data_flags}"$DATA"
"""

_RUN = """#!/usr/bin/env bash
# Does one run with the seed $SEED; its log is result_0.txt in its folder in $RESULTS.
set -euo pipefail
cd "$(dirname "$0")/../{implementation}"
PATH="$PWD/venv/bin:$PATH"
{command}
"""


def write_scripts(package: Package, implementation: str, command: str, record: RunRecord | None) -> None:
    """Writes the missing files into the system's folder of the implementations; command: one run, as a line of a shell
    script."""
    system, folder = package.system, package.implementations / package.system
    pins = "gpu" if record is None or record["machine"]["gpus"] else "cpu"
    names = {"system": system, "implementation": implementation, "command": command, "pins": pins}
    benchmark = named(package.benchmark)
    assert benchmark.ruleset is not None  # a package is of one of MLPerf's benchmarks
    names |= {"title": benchmark.title, **benchmark.ruleset.submission_words._asdict()}
    configuration = {key: record[key] for key in ("config", "git", "pipeline")} if record else {}
    files = {
        f"{system}_{implementation}.json": json.dumps(configuration, indent=4) + "\n",
        **({RUN_JSON: json.dumps(record, indent=1) + "\n"} if record else {}),  # which logs name as configuration
        "README.md": _README.format(**names),
        "setup.sh": _SETUP.format(**names),
        "init_datasets.sh": _DATASETS.format(**names),
        "run_and_time.sh": _RUN.format(**names),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        if not path.exists():
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if path.suffix == ".sh" else 0o644)
