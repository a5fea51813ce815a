"""pip's installation: one name, all of its files, and a core that compares and reports without torch."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.bench.made_records import recorded_runs, write
from tests.test_floors import FILES, FLOORS, PACKAGE, ROOT, imported

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NOT_IN_THE_CORE = ("torch", "torchrec", "fbgemm_gpu", "triton", "mlperf_logging", "pynvml")
DISTRIBUTION_OF = {"PIL": "pillow", "typing_extensions": "typing-extensions"}
"""Where the name to import is not the name to install."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the setuptools of this environment, from a copy: a build leaves files in its tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for folder in (*FLOORS, PACKAGE, "tests"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip fills site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder


def python(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the installed copy ahead of the checkout that this environment may know."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def without(missing: Sequence[str], program: str) -> str:
    """The program with a beginning that makes these packages look as if they were not installed."""
    return f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {tuple(missing)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
{program}"""


def dlrm_bench_without_torch(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `dlrm-bench` where only the core is installed."""
    module, function = PYPROJECT["project"]["scripts"]["dlrm-bench"].split(":")
    program = without(NOT_IN_THE_CORE, f"from {module} import {function}; sys.exit({function}())")
    return python(site, cwd, "-c", program, *arguments)


def launch_without(missing: Sequence[str], site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Starts a run where these packages are not installed."""
    launch = f"import runpy; sys.argv = ['dlrm.py']; runpy.run_module('{PACKAGE}.launch.dlrm', run_name='__main__')"
    return python(site, cwd, "-c", without(missing, launch))


def test_the_wheel_holds_one_name_and_every_file(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    project = PYPROJECT["project"]
    about = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {PACKAGE, about}
    assert {name for name in names if name.endswith(".py")} == {
        f"{PACKAGE}/{path.relative_to(ROOT).as_posix()}" for path in FILES
    } | {f"{PACKAGE}/__init__.py"}
    others = [path for folder in FLOORS for path in (ROOT / folder).rglob("*") if path.is_file() and path not in FILES]
    of_products = ("pyproject.toml", "LICENSE")
    needed = {
        path.relative_to(ROOT).as_posix()
        for path in others
        if path.suffix not in (".pyc", ".md") and path.name not in of_products
    }
    assert "bench/report/templates/report.html" in needed
    assert {f"{PACKAGE}/{name}" for name in needed} <= set(names)


def test_compare_and_report_work_without_torch(site, tmp_path):
    runs = recorded_runs()
    for i in range(4):
        write(tmp_path / "records" / "a" / f"run{i}", runs[2 * i], minute=2 * i)
        write(tmp_path / "records" / "b" / f"run{i}", runs[2 * i + 1] * 2, minute=2 * i + 1)
    compared = dlrm_bench_without_torch(site, tmp_path, "compare", "records/a", "records/b")
    assert (compared.returncode, compared.stderr) == (0, "")
    assert "B is slower" in compared.stdout
    reported = dlrm_bench_without_torch(site, tmp_path, "report", "records", "--out", "page")
    assert reported.returncode == 0, reported.stderr
    assert "</html>" in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")


def test_the_core_names_what_it_imports(site, tmp_path):
    """Every third-party package that `compare`, its statistics and `report` import is a dependency, and no other."""
    floors = [ROOT / "bench" / room for room in ("records", "compare", "stats", "report")]
    rooms = [path for floor in floors for path in floor.glob("*.py")]
    modules = [".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)) for path in rooms]
    program = (
        f"import importlib, sys\nfor name in {[*modules, 'dlrm_bench.bench.cli']!r}: importlib.import_module(name)\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('dlrm_bench.')), sep='\\n')"
    )
    files = [Path(line) for line in python(site, tmp_path, "-c", program).stdout.split()]
    assert len(files) > len(rooms)
    assert all(file.is_relative_to(site) for file in files)
    names = {name.split(".")[0] for file in files for name in imported(ast.parse(file.read_text(encoding="utf-8")))}
    third_party = names - sys.stdlib_module_names - {PACKAGE, ""}  # "": relative imports, of the products
    declared = {re.split(r"[<>=~!\[]", dependency)[0] for dependency in PYPROJECT["project"]["dependencies"]}
    assert {DISTRIBUTION_OF.get(name, name) for name in third_party} == declared


def test_a_command_that_needs_torch_says_what_to_install(site, tmp_path):
    said = "this needs torch, which is not installed: in a checkout of dlrm-bench, pip install '.[run]'"
    for command in (["ladder", "--rungs", "cpu"], ["host"], ["limits"]):
        done = dlrm_bench_without_torch(site, tmp_path, *command, "--preset", "smoke")
        assert (done.returncode, done.stderr) == (2, f"error: {said}\n")
    done = launch_without(NOT_IN_THE_CORE, site, tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {said}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_says_what_else_to_install(site, tmp_path):
    done = launch_without(["torchrec"], site, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: this needs torchrec, which is not installed: in a checkout")
    assert len(done.stderr.splitlines()) == 1


def trees_launched(launcher: Path, arguments: Sequence[str], cwd: Path, *path: Path) -> set[str]:
    """The trees that `python launcher arguments` loads modules from, with `path` as PYTHONPATH."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-v", str(launcher), *arguments]  # -v: a line for each file that is loaded
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["preset"] == "smoke"
    loaded = set(re.findall(r"([^\s']+)/bench/(?:__pycache__/)?(?:flags|config)\.", done.stderr))
    return loaded | set(re.findall(r"([^\s']+)/dlrm/(?:__pycache__/)?presets\.", done.stderr))


@pytest.mark.parametrize(("name", "kind"), [("dlrm.py", []), ("measure.py", ["limits"])])
def test_a_launcher_runs_its_own_tree(site, tmp_path, name, kind):
    """Wherever it stands, and whatever else the path leads to."""
    copy = tmp_path / "copy"
    for folder in (*FLOORS, PACKAGE):  # links become folders, as some archives unpack
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    trees = {site / PACKAGE: (ROOT,), ROOT: (site,), copy: (ROOT, site)}
    for tree, elsewhere in trees.items():
        loaded = trees_launched(tree / "launch" / name, [*kind, "--print-config"], tmp_path, *elsewhere)
        assert loaded == {str(tree if tree.name == PACKAGE else tree / PACKAGE)}


@pytest.mark.slow
def test_a_ladder_of_the_installed_copy_starts_the_installed_copy(site, tmp_path):
    """A run in the way of `dlrm-bench ladder`, to its end."""
    program = (
        "import sys; from pathlib import Path; from dlrm_bench.bench.ladder.launching import LAUNCHER, run_forked; "
        "print(LAUNCHER, flush=True); run_forked(sys.argv[1:], 1, Path('output'))"
    )
    flags = "--preset smoke --data.source random --data.random-batches 2 --local-batch-size 64 --target-auc None"
    short = "--iterations 6 --warmup-iterations 2 --run-id x"
    done = python(site, tmp_path, "-c", program, *flags.split(), *short.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / PACKAGE / "launch" / "dlrm.py")]
    run = json.loads((tmp_path / "results" / "x" / "run.json").read_text(encoding="utf-8"))
    assert run["git"]["commit"] is None  # not the checkout's
    again = python(site, tmp_path, "-m", f"{PACKAGE}.launch.console", "rerun", "results/x", "--rounds", "1")
    assert again.returncode == 0, again.stderr
    (rerun,) = (tmp_path / "results").glob("*-rerun/00/run.json")
    source = json.loads(rerun.read_text(encoding="utf-8"))["git"]
    assert source == run["git"]
