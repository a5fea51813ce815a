"""The hook, in new processes: it changes modules as they are imported."""

import os
import subprocess
import sys
from pathlib import Path

from dlrm_bench.bench.doctor.site_folder import Settings, environment_with_hook

PIPELINES = """
class Base:
    def progress(self, batches):
        return next(batches)
class Derived(Base):
    def progress(self, batches):
        return super().progress(batches)
class EvalPipeline(Base):
    def progress(self, batches):
        return next(batches)
"""


def run(program: str, folder: Path, **environment: str) -> str:
    settings = Settings(folder=str(folder), warmup=3, iterations=5, keep_running=True)
    hooked = environment_with_hook(folder / "site", settings, os.environ | environment)
    done = subprocess.run([sys.executable, "-c", program], env=hooked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_starts_without_torch_and_with_the_package_alone(tmp_path):
    program = "import sys, dlrm_bench.bench; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run(program, tmp_path) == "False False"


def test_the_path_of_the_environment_is_kept(tmp_path):
    found = run("import os; print(os.environ['PYTHONPATH'])", tmp_path, PYTHONPATH="/theirs").split(os.pathsep)
    assert found == [str(tmp_path / "site"), "/theirs"]


def run_with_pipelines(program: str, tmp_path: Path) -> str:
    """Runs a program that can import PIPELINES as five_stage.pipeline."""
    package = tmp_path / "theirs" / "five_stage"
    package.mkdir(parents=True)
    (package / "pipeline.py").write_text(PIPELINES, encoding="utf-8")
    return run(program, tmp_path, PYTHONPATH=str(package.parent))


def test_a_pipelines_outermost_progress_begins_an_iteration(tmp_path):
    program = """
from dlrm_bench.bench.doctor import hook
calls = []
hook.boundary = lambda found_by: calls.append(found_by)
from five_stage.pipeline import Derived, EvalPipeline
Derived().progress(iter([1]))
EvalPipeline().progress(iter([1]))
print(calls, Derived.progress.__name__)
"""
    assert run_with_pipelines(program, tmp_path) == "['progress'] progress"


def test_a_progress_that_ends_an_epoch_is_no_iteration(tmp_path):
    program = """
from contextlib import suppress
from dlrm_bench.bench.doctor import hook
calls = []
hook.boundary = lambda found_by: calls.append(found_by)
from five_stage.pipeline import Derived
for _ in range(5):
    batches = iter(range(10))
    with suppress(StopIteration):
        while True:
            Derived().progress(batches)
print(len(calls))
"""
    assert run_with_pipelines(program, tmp_path) == "50"


def test_functions_are_wrapped_before_anyone_takes_them(tmp_path):
    program = """
import torch
from dlrm_bench.bench.doctor import hook
from torch.cuda import synchronize
from torch.distributed import new_group
names = []
hook.state.marker = lambda name, function, args, kwargs: names.append(name)
synchronize(); new_group([0]); torch.cpu.synchronize(); torch.cuda.Event.synchronize(None)
hook.state.marker = None
torch.cpu.synchronize()
print(*names)
"""
    assert run(program, tmp_path).split() == [
        "torch.cuda.synchronize",
        "torch.distributed.distributed_c10d.new_group",
        "torch.cpu.synchronize",
        "torch.cuda.streams.Event.synchronize",
    ]


def test_the_first_optimizer_that_steps_leads(tmp_path):
    program = """
import torch
from dlrm_bench.bench.doctor import hook
calls = []
hook.boundary = lambda found_by: calls.append(found_by)
first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
for _ in range(3):
    first.step(); second.step()
print(calls)
"""
    assert run(program, tmp_path) == "['optimizer', 'optimizer', 'optimizer']"


def test_without_the_doctor_a_mark_does_nothing():
    program = "from dlrm_bench.bench.doctor import iteration, hook\nwith iteration(): print(hook.state.examination)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_a_script_that_limits_the_time_of_its_steps_keeps_its_signal(tmp_path):
    """Between its steps SIGALRM looks unused; the sampler's timer would run into a limit that is just being set."""
    program = """
import signal, time
from dlrm_bench.bench.doctor.sampler import Sampler
late = []
def limited(seconds):
    before = signal.signal(signal.SIGALRM, lambda number, frame: late.append(number))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    signal.signal(signal.SIGALRM, before)
limited(0)
assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
sampler = Sampler(1e-3)
sampler.start()
limited(0.05)
print(sampler.by_signal, late)
sampler.stop()
"""
    assert run(program, tmp_path) == "False []"


def test_the_samplers_handler_is_none_of_the_scripts(tmp_path):
    program = """
from dlrm_bench.bench.doctor.process_state import state
from dlrm_bench.bench.doctor.sampler import Sampler
for _ in range(2):
    sampler = Sampler(1e-3)
    sampler.start()
    print(sampler.by_signal, state.alarmed, end=" ")
    sampler.stop()
"""
    assert run(program, tmp_path) == "True False True False"
