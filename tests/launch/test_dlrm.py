"""The command line, and whole runs under torchrun: on one node, on two, and stopped by signals."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.config import PIPELINES, RunConfig, as_json
from dlrm_bench.bench.mlperf.log import check_compliance
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.record import Record, read_record
from dlrm_bench.bench.run_files import LOG_NAME
from dlrm_bench.dlrm.benchmarks import PRESETS
from dlrm_bench.dlrm.dcnv2.data.planted import PlantedConfig, generate
from tests.launched import (
    LAUNCHER,
    PATIENCE_S,
    Ended,
    end,
    forked_launch,
    ranks_naming,
    torchrun,
    wait_until,
    wait_until_training,
)
from tests.pipelines import changed


def without_torchrun() -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def typed(folder: Path, *arguments: str) -> tuple[int | None, str]:
    """Exit status and output of `python launch/dlrm.py arguments`."""
    ended: Ended = forked_launch(1, folder, arguments, before=without_torchrun)
    return ended.statuses[0], ended.outputs[0]


def flags(config: Any, prefix: str = "--") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name.replace("_", "-")
        if field.name == "pipeline":
            yield from flags(value)
        else:
            yield from flags(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_help_explains_every_field(tmp_path, pipeline):
    status, text = typed(tmp_path, "--pipeline", pipeline, "--help")
    assert status == 0
    text = re.sub(r"[│╭╮╰╯─]", " ", text)
    for flag in flags(changed(preset("smoke"), pipeline)):
        if flag == "--benchmark":  # follows from --preset
            continue
        entry = re.search(rf"^ +{re.escape(flag)}[ ,].*\n((?: {{4,}}(?!-).*\n)+)", text, re.MULTILINE)
        assert entry, f"{flag} is not in the help"
        explanation = " ".join(entry[1].split("(default:")[0].split())
        assert len(explanation) > 10, f"{flag}: {explanation!r}"
        assert explanation.endswith((".", ")")), f"{flag}: {explanation!r}"
    for name in PRESETS:
        assert name in text
    assert "--print-config" in text
    assert "--print-plan [RANKS]" in text


@pytest.mark.parametrize("name", PRESETS)
def test_print_config_needs_no_torchrun(tmp_path, name):
    expected: RunConfig = preset(name)
    changed = dataclasses.replace(expected, seed=7, run_id="x")
    arguments = ["--preset", name, "--print-config", "--seed", "7", "--run-id=x"]
    if hasattr(expected.model, "table_scale"):
        changed = dataclasses.replace(changed, model=dataclasses.replace(expected.model, table_scale=0.5))
        arguments += ["--model.table-scale", "0.5"]
    status, text = typed(tmp_path, *arguments)
    assert status == 0
    assert json.loads(text) == as_json(changed)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--preset launch-bound --pipeline five-stage", {"name": "five-stage"}),
        ("--pipeline static --cuda-graph iteration", {"name": "static", "cuda_graph": "iteration"}),
        (
            "--pipeline five-stage --cuda-graph dense --launch-threads 2 --trim-input-dist --pinned-d2h "
            "--avoid-record-streams",
            dict.fromkeys(("trim_input_dist", "pinned_d2h", "avoid_record_streams"), True) | {"launch_threads": 2},
        ),
        (
            "--pipeline torchrec --schedule base --inplace-copy --quantized-comms bf16 --no-row-wise",
            {"schedule": "base", "inplace_copy": True, "quantized_comms": "bf16", "row_wise": False},
        ),
    ],
)
def test_every_variant_has_its_flags(tmp_path, arguments, shown):
    status, text = typed(tmp_path, "--print-config", *arguments.split())
    assert status == 0
    assert json.loads(text)["pipeline"].items() >= shown.items()


def test_print_plan_needs_no_torchrun(tmp_path):
    status, text = typed(tmp_path, "--print-plan", "4", "--preset", "launch-bound")
    assert status == 0
    assert "launch-bound with --pipeline static on 4 rank(s), global batch 2048" in text
    status, text = typed(tmp_path, "--print-plan", "--local-batch-size", "64")
    assert status == 0
    assert "on 8 rank(s), global batch 512" in text


def test_print_plan_takes_the_host_memory_of_a_node(tmp_path):
    """Twice MLPerf's rows, half of them in host memory: of one node of two GPUs, and of two nodes of one."""
    tiers = ["--pipeline", "static", "--presort-ids", "--table-memory", "0.5", "--model.table-scale", "2"]
    plan = ["--preset", "launch-bound", *tiers, "--print-plan", "2", "--host-memory-gb"]
    one, two, small, explained = (
        typed(tmp_path / str(number), *arguments)
        for number, arguments in enumerate(
            ([*plan, "400"], [*plan, "200", "--gpus-per-node", "1"], [*plan, "200"], ["--help"])
        )
    )
    assert [status for status, _ in (one, two, small, explained)] == [0, 0, 2, 0]
    assert "host memory of a node: 209.1 of 400.0 GB" in one[1]
    assert re.search(r"host memory of a node: 1\d\d\.\d of 200\.0 GB", two[1])
    assert "tables and optimizer state take 418.2 GB, but 1 node(s) of 2 GPU(s) have" in small[1]
    assert "190.0 GB of host memory" in small[1]
    assert "`--host-memory-gb GB` the host memory of a node, which its GPUs share" in " ".join(explained[1].split())


def test_smoke_is_the_default(tmp_path):
    assert json.loads(typed(tmp_path, "--print-config")[1])["preset"] == "smoke"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            [],
            "RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start this program with",
        ),
        (["--learning-rte", "1"], "--learning-rte"),
        (["--preset", "fast"], "--preset 'fast' is unknown: choose one of smoke"),
        (["--local-batch-size", "0"], "--local-batch-size is 0"),
        (["--local-batch-size", "many"], "--local-batch-size"),
        (["--precision", "fp8"], "--precision"),
        (["--pipeline", "six-stage"], "--pipeline 'six-stage' is unknown: choose one of torchrec, five-stage, static"),
        (["--pipeline", "five-stage", "--launch-threads", "3"], "--launch-threads"),
        (["--overlap"], "--overlap is an option of --pipeline static, not of torchrec"),
        (["--pipeline", "static", "--no-row-wise"], "--no-row-wise is an option of --pipeline torchrec and five-stage"),
        (["--model.table-scale", "3e6"], "--model.table-scale 3e+06 makes a table of 3000000000 rows"),
        (["--seed"], "--seed"),
        (["--preset"], "error: --preset: expected one argument"),
        (["--print-plan", "0"], "--print-plan 0: a plan is for at least one rank"),
        (["--print-plan", "200"], "26 tables of 16 columns cannot give each of 200 ranks a shard: use fewer ranks"),
        (["--print-plan", "many"], "error: --print-plan: invalid int value: 'many'"),
        (["--limits", "limits.json"], "--limits needs --print-plan"),
        (["--print-plan", "4", "--limits", "nowhere"], "nowhere cannot be read"),
    ],
)
def test_what_is_typed_wrong_is_named(tmp_path, arguments, error):
    status, text = typed(tmp_path, *arguments)
    assert status == 2
    assert error in " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
    assert "Traceback" not in text


def test_starts_from_any_directory_and_a_reader_may_leave(tmp_path):
    command = f"'{sys.executable}' '{LAUNCHER}' --print-config | head -n 1"
    piped = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert piped.stdout == "{\n"
    assert piped.stderr == ""


@pytest.mark.parametrize(
    ("launcher", "arguments", "status"),
    [
        ("dlrm", ["--help"], 0),
        ("dlrm", ["--print-config"], 0),
        ("dlrm", ["--learning-rte", "1"], 2),
        ("dlrm", ["--local-batch-size", "0"], 2),
        ("measure", ["limits", "--help"], 0),
        ("measure", ["ghost"], 2),
    ],
)
def test_help_and_a_wrong_flag_import_no_torch(launcher, arguments, status):
    """They answer at once; torch and TorchRec take seconds to import."""
    program = f"""
import sys
from dlrm_bench.launch.failures import guarded
from dlrm_bench.launch.{launcher} import main
sys.argv[0] = "{launcher}.py"
try:
    ended = guarded(main)
except SystemExit as leave:
    ended = leave.code or 0
print("imported:", *({{"torch", "torchrec", "fbgemm_gpu", "triton", "pynvml"}} & set(sys.modules)), file=sys.stderr)
sys.exit(ended)
"""
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1] == "imported:"


# Under torchrun.


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a run of some seconds that reaches its target."""
    path, _, _ = generate(PlantedConfig(path=tmp_path_factory.mktemp("data"), samples_per_day=6000))
    return ["--data.path", str(path), "--local-batch-size=128", "--target-auc=0.6", "--warmup-iterations=2"]


@pytest.fixture
def started() -> Iterator[Callable[..., Any]]:
    """Starts torchrun; whatever it started is ended after the test."""
    runs = []

    def start(folder: Path, *arguments: str, **keywords: Any) -> Any:
        folder.mkdir(exist_ok=True)
        process = torchrun(folder / "output", ["--results-dir", str(folder / "results"), *arguments], **keywords)
        runs.append((process, str(folder)))
        return process

    yield start
    for process, text in runs:
        end([process], text)


def only_record(folder: Path) -> Record:
    (record,) = (folder / "results").iterdir()
    assert sorted(path.name for path in record.iterdir()) == ["iterations.npz", LOG_NAME, "run.json"]
    return read_record(record)


@pytest.mark.slow
def test_one_node_and_two_nodes_train_alike(smoke, tmp_path):
    """Under torchrun, test_slurm.py has two hosts."""
    ended = {}
    for name, nodes in (("one", 1), ("two", 2)):
        arguments = [*smoke, "--results-dir", str(tmp_path / name / "results")]
        ended[name] = forked_launch(2, tmp_path / name, arguments, nodes=nodes)
        assert ended[name].statuses == [0, 0], ended[name].outputs
    one_node, two_nodes = only_record(tmp_path / "one"), only_record(tmp_path / "two")
    np.testing.assert_allclose(two_nodes.losses, one_node.losses, rtol=1e-5)
    for record in (one_node, two_nodes):
        assert record.iterations_ms.shape == (2, len(record.losses))
        log = record.folder / LOG_NAME
        assert check_compliance(log, "6.0.0").passed
        assert log.read_text().count('"key": "run_start"') == 1
    assert two_nodes.run["command"].startswith("torchrun --nnodes=2 --nproc_per_node=1 launch/dlrm.py --data.path")
    assert one_node.run["command"].startswith("torchrun --nproc_per_node=2 launch/dlrm.py --data.path")
    assert ["record " in output for output in ended["two"].outputs] == [True, False]


def test_run_and_record_say_how_a_five_stage_run_was_scheduled(smoke, tmp_path):
    place = ["--results-dir", str(tmp_path / "results"), "--run-id", "x"]
    switches = ["--cuda-graph", "dense", "--pinned-d2h"]
    ended = forked_launch(2, tmp_path, [*smoke, "--pipeline", "five-stage", *switches, *place])
    assert ended.statuses == [0, 0], ended.outputs
    assert ["".join(ended.outputs).count(f"{switch} is off: ") for switch in ("cuda_graph", "pinned_d2h")] == [1, 0]
    run = read_record(tmp_path / "results" / "x").run
    assert [run["config"]["pipeline"][option] for option in ("name", "cuda_graph")] == ["five-stage", "dense"]
    assert list(run["pipeline"]["switched_off"]) == ["pinned_d2h", "cuda_graph"]  # no GPU


def to_torchrun(process: Any, folder: Path) -> int:
    return int(process.pid)


def to_one_worker(process: Any, folder: Path) -> int:
    return max(ranks_naming(str(folder)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whom", "ranks"),
    [(signal.SIGTERM, to_torchrun, 1), (signal.SIGKILL, to_torchrun, 1), (signal.SIGTERM, to_one_worker, 2)],
    ids=["SIGTERM to torchrun", "SIGKILL to torchrun", "SIGTERM to one rank"],
)
def test_a_signal_ends_the_run(started, tmp_path, number, whom, ranks):
    arguments = ["--data.source=random", "--target-auc=None", "--iterations=1000000", "--local-batch-size=64"]
    process = started(tmp_path, *arguments, "--run-id=x", options=[f"--nproc_per_node={ranks}"])
    log = tmp_path / "results" / "x" / LOG_NAME
    wait_until_training(log, lambda: ranks_naming(str(tmp_path)))
    assert len(list(ranks_naming(str(tmp_path)))) == ranks
    os.kill(whom(process, tmp_path), number)
    assert process.wait(PATIENCE_S) != 0
    wait_until(lambda: not list(ranks_naming(str(tmp_path))), "all ranks have ended")
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    assert [event["key"] for event in events[-2:]] == ["run_stop", "epoch_stop"]
    assert events[-2]["metadata"]["status"] == "aborted"
    assert not (log.parent / "run.json").exists()
    said = "its torchrun was killed" if number == signal.SIGKILL else f"stopped by {number.name}"
    assert said in (tmp_path / "output").read_text()
