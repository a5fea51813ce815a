"""The Slurm script: its commands, by stubs of srun; and real runs over two hosts, which are network namespaces."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.compare.comparison import compare_paths
from dlrm_bench.bench.flags import parse_run
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.run_files import LOG_NAME
from tests.launched import PATIENCE_S, forked_launch, wait_until

SBATCH = ROOT / "launch" / "slurm" / "train.sbatch"
SYSTEMS = sorted(path.stem for path in (ROOT / "launch" / "slurm").glob("dgx-*.sh"))
FLAGS = "--preset smoke --data.source random --target-auc None --local-batch-size 16 --warmup-iterations 2"
STATIC = [*FLAGS.split(), "--pipeline", "static", "--presort-ids", "--optimizer.learning-rate", "1e-4"]

# Writes its options, the environment's part for node.sh, and its command as a line of JSON.
RECORDING_SRUN = """#!{python}
import json, os, sys
at = next(i for i, word in enumerate(sys.argv) if word.endswith("node.sh"))
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([sys.argv[1:at], sys.argv[at:]]) + "\\n")
sys.exit(int(os.environ.get("SRUN_STATUS", 0)))
"""

# Runs the command on each host, under a host name of its own, and waits for both; the first bad status is its own.
TWO_HOSTS_SRUN = """#!{python}
import os, subprocess, sys
at = next(i for i, word in enumerate(sys.argv) if word.endswith("node.sh"))
(export,) = [sys.argv[i + 1] for i in range(at) if sys.argv[i] == "--export"]
given = dict(pair.split("=", 1) for pair in export.removeprefix("ALL,").split(","))
processes = []
for node, host in enumerate(os.environ["HOSTS"].split()):
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"node{{node}}", *sys.argv[at:]]
    environment = os.environ | given | {{"SLURM_NODEID": str(node)}}
    processes.append(subprocess.Popen(["ip", "netns", "exec", host, *named], env=environment))
sys.exit(next((1 for status in [process.wait() for process in processes] if status), 0))
"""

CPU_SYSTEM = """
RANKS_PER_NODE=2
BINDING=()
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= GLOO_SOCKET_IFNAME=eth0
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A folder with stubs of Slurm's commands, from which jobs start."""

    folder: Path
    environment: dict[str, str]

    def start(self, arguments: Sequence[str], **environment: str) -> Any:
        """The batch script's Popen; both streams go to folder/output."""
        with (self.folder / "output").open("wb") as sink:
            return subprocess.Popen(
                [str(SBATCH), *arguments],
                env=self.environment | environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, arguments: Sequence[str], **environment: str) -> int:
        return self.start(arguments, **environment).wait(PATIENCE_S)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()


def make_job(folder: Path, srun: str, hosts: Sequence[str]) -> Job:
    commands = folder / "bin"
    commands.mkdir()
    for name, text in (
        ("srun", srun.format(python=sys.executable)),
        ("scontrol", "#!/bin/sh\necho " + "; echo ".join(hosts) + "\n"),
    ):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "RESULTS": str(folder / "results"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    return Job(folder, environment)


@pytest.fixture
def recorded(tmp_path: Path) -> Job:
    job = make_job(tmp_path, RECORDING_SRUN, ["first", "second"])
    job.environment["CALLS"] = str(tmp_path / "calls")
    return job


def calls(job: Job) -> list[tuple[str, list[str]]]:
    """Options of srun, joined, and its command, of each call."""
    lines = (job.folder / "calls").read_text().splitlines()
    return [(" ".join(options), command) for options, command in map(json.loads, lines)]


def flag(command: Sequence[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_submission_is_ten_runs_of_their_own_seeds_and_records(recorded, system):
    assert recorded.run(["--preset", "smoke"], SYSTEM=system, RUNS="10", SEED="40") == 0, recorded.output
    made = calls(recorded)
    assert [flag(command, "--seed") for _, command in made] == [str(seed) for seed in range(40, 50)]
    assert len({flag(command, "--run-id") for _, command in made}) == 10
    for options, command in made:
        assert "--nodes 2 --ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit 1" in options
        assert f"SYSTEM_FILE={ROOT}/launch/slurm/{system}.sh,HEAD=first," in options
        assert command[1:3] == ["--preset", "smoke"]
    assert len({re.search(r"PORT=(\d+)", options)[1] for options, _ in made}) == 10


def test_what_the_arguments_name_holds(recorded):
    """So dlrm-bench ladder --launch names records and seeds."""
    named = ["--results-dir", "/shared/ladder", "--run-id=00-stock", "--seed", "7"]
    assert recorded.run(["--preset", "smoke", *named], SYSTEM="dgx-h200", SEED="40") == 0, recorded.output
    ((options, command),) = calls(recorded)
    assert "RECORD=/shared/ladder/00-stock" in options
    assert command[-6:] == ["--results-dir", "/shared/ladder", "--run-id", "00-stock", "--seed", "7"]
    assert recorded.run(named, SYSTEM="dgx-h200", RUNS="2") == 2
    assert "--run-id names one run" in recorded.output


def test_a_container_sees_the_checkout_and_what_is_mounted(recorded):
    environment = {"CONTAINER": "image.sqsh", "MOUNTS": "/data:/data"}
    assert recorded.run([], SYSTEM="dgx-h200", **environment) == 0, recorded.output
    ((options, _),) = calls(recorded)
    assert (
        f"--container-image image.sqsh --container-workdir {ROOT} --container-mounts {ROOT}:{ROOT},/data:/data"
        in options
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "name the machine: --export ALL,SYSTEM=dgx-h100 or dgx-h200"),
        ({"SYSTEM": "dgx-x"}, "SYSTEM=dgx-x is no file, and launch/slurm has no dgx-x.sh"),
        ({"SYSTEM": "dgx-h100", "SLURM_SUBMIT_DIR": "/"}, "sbatch from the root of the checkout, not from /"),
        ({"SYSTEM": "dgx-h100", "SRUN_STATUS": "1", "RUNS": "2"}, "2 of 2 runs failed"),
    ],
)
def test_what_is_wrong_is_said(recorded, environment, message):
    recorded.environment.pop("SYSTEM", None)
    assert recorded.run([], **environment) != 0
    assert message in recorded.output


@pytest.mark.parametrize("system", SYSTEMS)
def test_settings_are_complete(system):
    """They have the variables that node.sh reads, each with an explanation."""
    path = ROOT / "launch" / "slurm" / f"{system}.sh"
    shown = 'set -eu; . "$0"; echo "$RANKS_PER_NODE ${BINDING[*]} $NCCL_IB_HCA"'
    bash = ["bash", "-c", shown, str(path)]
    found = subprocess.run(bash, env={"ROOT": str(ROOT)}, capture_output=True, text=True, check=True)
    ranks, *binding, adapters = found.stdout.split()
    assert (ranks, binding, len(adapters.split(","))) == ("8", ["--numa-binding", "node"], 8)
    for block in path.read_text().split("\n\n")[1:]:
        assert block.startswith(("#", "RANKS_PER_NODE")), f"no reason is given: {block}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, whose interfaces eth0 are joined."""
    if any(shutil.which(command) is None for command in ("ip", "unshare")):
        pytest.skip("needs the commands ip and unshare")
    names = [f"dlrm{os.getpid()}-{node}" for node in range(2)]
    try:
        ip("netns", "add", names[0])
        subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", names[0]], capture_output=True, check=False)
        pytest.skip(f"this machine makes no network namespaces: {error.stderr}")
    try:
        ip("netns", "add", names[1])
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for node, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            for pid in pids_of(name):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def pids_of(host: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


@pytest.fixture
def job(tmp_path: Path, two_hosts: list[str]) -> Job:
    made = make_job(tmp_path, TWO_HOSTS_SRUN, ["10.77.0.1", "10.77.0.2"])
    (tmp_path / "cpu.sh").write_text(CPU_SYSTEM)
    made.environment.update(SYSTEM=str(tmp_path / "cpu.sh"), HOSTS=" ".join(two_hosts))
    return made


@pytest.mark.slow
def test_two_hosts_train_like_one_and_comparisons_tell_them_apart(job, tmp_path):
    arguments = [*STATIC, "--peer-memory", "--iterations", "8"]
    assert job.run(arguments) == 0, job.output
    (folder,) = (tmp_path / "results").iterdir()
    two = read_record(folder)
    assert (two.run["machine"]["nodes"], two.run["machine"]["hosts"]) == (2, ["node0", "node1"])
    assert two.iterations_ms.shape == (4, 8)
    for node in range(2):
        assert (folder / f"node-{node}.txt").read_text().startswith(f"node {node} of 2: node{node}, ")
    one_host = ["--results-dir", str(tmp_path / "one"), "--run-id", "one"]
    ended = forked_launch(4, tmp_path / "forked", [*STATIC, "--iterations", "8", *one_host])
    assert ended.statuses == [0] * 4, ended.outputs
    one = read_record(tmp_path / "one" / "one")
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-5)
    (compared,) = compare_paths([tmp_path / "one" / "one", folder])
    assert any("number of nodes differs: 1 in" in text for text in compared.differences), compared.differences


@pytest.mark.slow
def test_a_lost_host_ends_the_ranks_of_the_other_and_is_named(job, two_hosts, tmp_path):
    settings = tmp_path / "cpu.sh"
    settings.write_text(settings.read_text().replace("RANKS_PER_NODE=2", "RANKS_PER_NODE=1"))  # half the imports
    process = job.start([*STATIC, "--iterations", "1000000"])

    def training() -> bool:
        logs = list((tmp_path / "results").glob(f"*/{LOG_NAME}"))
        return any("epoch_start" in log.read_text() for log in logs)

    wait_until(lambda: training() or process.poll() is not None, "training has begun")
    assert process.poll() is None, job.output
    lost = pids_of(two_hosts[1])
    for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once: a rank would still tell of its killed torchrun
        for pid in lost:
            os.kill(pid, number)
    assert process.wait(PATIENCE_S) == 1
    # Whether a rank's collective or its torchrun notices first, and so says more, is open.
    assert "10.77.0.2" in job.output, "the lost host"
    assert "1 of 1 runs failed" in job.output
    (log,) = (tmp_path / "results").glob(f"*/{LOG_NAME}")
    assert '"status": "aborted"' in log.read_text()


def section(name: str) -> str:
    """A section of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {name}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"the README has no section {name!r}"
    return found[1].replace("\\\n", " ")


def test_the_readme_is_followed_word_by_word(recorded, tmp_path):
    """Its batch job by the stub of srun, whose arguments launch/dlrm.py understands; its plan; its model's files."""
    commands = [shlex.split(line) for line in re.findall(r"^    (\S.*)", section("Several nodes"), re.MULTILINE)]
    batch, plan, model = ([c for c in commands if c[0] == name] for name in ("sbatch", "python", "dlrm-bench"))
    for command in batch:
        script = command.index("launch/slurm/train.sbatch")
        given = dict(pair.split("=") for pair in flag(command, "--export").split(",") if "=" in pair)
        assert recorded.run(command[script + 1 :], **given) == 0, recorded.output
        _, started = calls(recorded)[-1]
        rest = list(started[1:])
        chosen = [rest.pop(rest.index(name) + 1) for name in ("--preset", "--pipeline")]
        rest = [word for word in rest if word not in ("--preset", "--pipeline")]
        assert parse_run(*chosen, rest, None, False).pipeline.name == chosen[1]
    for command in plan:
        ended = forked_launch(1, tmp_path / "plan", command[2:])
        assert ended.statuses == [0], ended.outputs
        assert "on 16 rank(s) of 2 nodes" in ended.outputs[0]
    for command in model:
        assert command[1] == "scale"
        assert all((ROOT / word).exists() for word in command if word.startswith("results/"))
    assert batch
    assert plan
    assert model
