"""pip's installation of each product alone: its files under its own name, and a small example that works."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.launched import fork, free_port, rank_environment, run_script, wait
from tests.test_floors import FLOORS, PACKAGE, PRODUCTS, ROOT, files_of, imported
from tests.test_install import DISTRIBUTION_OF, without

SCRIPT = """
import torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(60):
    optimizer.zero_grad()
    loss = (weight * weight).sum()
    loss.backward()
    optimizer.step()
    if loss.item() < 0:
        break
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment with all products, beside the packages of this one but without the project."""
    folder = tmp_path_factory.mktemp("alone")
    wheels = []
    for product in PRODUCTS:
        tree = shutil.copytree(
            ROOT / product,
            folder / "trees" / product,
            ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"),
        )
        out = folder / product
        out.mkdir(parents=True)
        build = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
        done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        wheels += out.glob("*.whl")
    assert len(wheels) == len(PRODUCTS)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    done = subprocess.run([*pip, "--no-deps", "--no-index", *wheels], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("\n".join(others), encoding="utf-8")
    return python


def environment() -> dict[str, str]:
    """Makes an environment in which nothing of the rest of the project can be imported."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(alone: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([alone, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True)


def printed(alone: Path, cwd: Path, program: str) -> str:
    done = run(alone, cwd, "-c", without((PACKAGE, *FLOORS), program))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def project(product: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / product / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distribution(product: str) -> str:
    return str(project(product)["name"]).replace("-", "_")


@pytest.mark.parametrize(("product", "name"), PRODUCTS.items())
def test_a_product_installs_every_file_under_its_own_name(alone, tmp_path, product, name):
    program = f"import {name}; print({name}.__path__[0], {name}.__version__)"
    folder, version = printed(alone, tmp_path, program).split()
    assert Path(folder).is_relative_to(alone.parents[1])
    there = {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.py")}
    assert there == {path.relative_to(ROOT / product).as_posix() for path in files_of(product)}
    (about,) = Path(folder).parent.glob(f"{distribution(product)}-{version}.dist-info")
    page = (ROOT / product / "README.md").read_text(encoding="utf-8")
    assert page.strip() in (about / "METADATA").read_text(encoding="utf-8")


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_names_what_it_imports(product):
    """Every package that it imports is declared, but for torch, with its Triton, and TorchRec, which are there under
    whatever name."""
    names = {name.split(".")[0] for path in files_of(product) for name in imported(ast.parse(path.read_text()))}
    third_party = {name for name in names if name} - sys.stdlib_module_names
    declared = {dependency.partition(">")[0] for dependency in project(product)["dependencies"]}
    theirs = {"torch", "triton", "torchrec", "fbgemm_gpu", "sitecustomize"}
    assert {DISTRIBUTION_OF.get(name, name) for name in third_party} - theirs == declared


@pytest.mark.slow
def test_the_drop_in_trains_alone(alone, tmp_path):
    """examples/torchrec_script.py, its imports by the drop-in's own name: the loss is stock TorchRec's."""
    script = (ROOT / "examples" / "torchrec_script.py").read_text(encoding="utf-8")
    ours = f"{PACKAGE}.pipeline.five_stage"
    assert ours in script
    (tmp_path / "script.py").write_text(script.replace(ours, "five_stage"), encoding="utf-8")
    place = rank_environment(0, 1, free_port())
    done = subprocess.run([alone, "script.py"], cwd=tmp_path, env=environment() | place, capture_output=True, text=True)
    assert done.stdout.startswith("rank 0: "), done.stderr
    stock = wait(fork(1, tmp_path, run_script, ROOT / "examples" / "torchrec_script.py", ["--stock"]), tmp_path)
    assert done.stdout.strip() in stock.outputs[0].splitlines(), stock


def test_the_drop_in_captures_without_torchrec(alone, tmp_path):
    program = "import sys; from five_stage.cuda_graph import record; print('torchrec' in sys.modules)"
    assert printed(alone, tmp_path, program) == "False"


def test_the_doctor_examines_a_script_alone(alone, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    flags = ["--warmup", "5", "--iterations", "10", "--json", "doctor.json", "--page", "doctor.html"]
    done = run(alone, tmp_path, str(alone.with_name("host-doctor")), *flags, "--", str(alone), "train.py")
    assert done.returncode == 0, done.stderr
    assert "train.py:10" in done.stdout  # loss.item()
    assert "</html>" in (tmp_path / "doctor.html").read_text(encoding="utf-8")


def test_the_doctor_says_bad_input_in_one_line(alone, tmp_path):
    done = run(alone, tmp_path, "-m", "host_doctor", "--fail-on", "x", "--", "true")
    assert (done.returncode, done.stderr) == (2, "error: --fail-on 'x' is unknown: it takes new-syncs\n")
    done = run(alone, tmp_path, "-m", "host_doctor", "--", "false")
    assert done.returncode == 1
    assert done.stderr == "error: `false` ended with status 1 before the doctor was done\n"


def test_the_statistics_compare_alone(alone, tmp_path):
    program = """
import sys
import numpy as np
from run_statistics.statistics import compare
draw = np.random.default_rng(0)
a = [10 + draw.normal(0, 0.1, 200) for _ in range(5)]
b = [series * draw.normal(0.9, 0.001) for series in a]
estimate = compare(a, b, paired=True).estimates["p50"]
print(round(estimate.speedup().value, 2), estimate.verdict(), "torch" in sys.modules)
"""
    assert printed(alone, tmp_path, program) == "1.11 faster False"
