"""The house rules that a reader of the tree relies on: who may import whom, one training loop, short files."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"kernels": 1, "dlrm": 2, "pipeline": 3, "bench": 4, "launch": 5}
PACKAGE = "dlrm_bench"
# An installation of a product leaves build/ in its folder.
FILES = sorted(
    path
    for floor in FLOORS
    for path in (ROOT / floor).rglob("*.py")
    if "build" not in path.relative_to(ROOT).parts[:-1]
)
PRODUCTS = {"pipeline/five_stage": "five_stage", "bench/doctor": "host_doctor", "bench/stats": "run_statistics"}
"""Folders that install alone, with the name that each is imported by where it does."""
APART = (*PRODUCTS, "pipeline/device_metrics")
"""Folders that import nothing of the rest, by relative imports alone."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in a file, also inside functions, also by importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Relative imports are the products', which have another name where they are installed alone.
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            argument = node.args[0]
            assert isinstance(argument, ast.Constant), "an import that cannot be read"
            yield str(argument.value)


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Every module that a file imports; files are read once."""
    return tuple(imported(ast.parse(path.read_text())))


def called(call: ast.Call) -> str:
    """Returns the last name of the called function: `f` of f(), a.f() and a.b.f()."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def folder_of(module: str) -> str:
    """The floor that a module of ours stands on; other modules have none."""
    names = module.split(".")
    return names[1] if names[0] == PACKAGE and len(names) > 1 else ""


def higher_floors(path: Path, names: Iterable[str]) -> list[str]:
    floor = FLOORS[path.parts[0]]
    return [name for name in names if FLOORS.get(folder_of(name), 0) > floor]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_imports_from_a_higher_floor(path):
    assert higher_floors(path.relative_to(ROOT), imports_of(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import dlrm_bench.bench.run",
        "from dlrm_bench.bench.run import run",
        "from dlrm_bench.bench import run",
        "def f():\n    from dlrm_bench.bench.run import run",
        "import_module('dlrm_bench.bench.run')",
    ],
)
def test_the_check_sees_every_form_of_import(source):
    assert higher_floors(Path("dlrm/dcnv2/network.py"), imported(ast.parse(source))) != []
    assert higher_floors(Path("launch/dlrm.py"), imported(ast.parse(source))) == []


def test_the_static_pipeline_and_what_it_stands_on_know_no_model():
    """They ask the benchmark for it."""
    rooms = ("pipeline/static", "dlrm/tables", "dlrm/dense", "dlrm/runtime", "dlrm/data")
    files = [path for path in FILES if any(path.is_relative_to(ROOT / room) for room in rooms)]
    models = tuple(f"{PACKAGE}.{name}" for name in ("dlrm.dcnv2", "dlrm.dlrmv4", "dlrm.zoo", "dlrm.benchmarks"))
    assert len(files) > 40
    for path in files:
        assert [name for name in imports_of(path) if name.startswith(models)] == [], path


MODELS = ("dlrm_bench.dlrm.dcnv2", "dlrm_bench.dlrm.dlrmv4", "dlrm_bench.dlrm.zoo", "torchrec.models")
"""Packages of single benchmarks, which the floors above know as values alone."""


def models_imported(tree: ast.AST) -> list[str]:
    """Imports of a model's package or of a part of it."""
    names = [*imported(tree)]
    for node in ast.walk(tree):  # `from dlrm_bench.dlrm import dcnv2`
        if isinstance(node, ast.ImportFrom) and not node.level:
            names += [f"{node.module}.{name.name}" for name in node.names]
    return sorted({name for name in names if any(f"{name}.".startswith(f"{model}.") for model in MODELS)})


def test_bench_launch_and_pipeline_know_no_model():
    """The drop-in and everything above dlrm/ ask a benchmark, which is a value; see dlrm/benchmark.py."""
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if path.relative_to(ROOT).parts[0] in ("pipeline", "bench", "launch")
        and models_imported(ast.parse(path.read_text()))
    }
    assert knowing == set(), "ask the benchmark (dlrm/benchmark.py) in place of its model"


def test_bench_launch_and_pipeline_name_no_model():
    """Neither in code nor in help and errors: what they say of a model is the benchmark's."""
    naming = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] in ("pipeline", "bench", "launch")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search("dcnv2|dlrm_dcn|dlrmv4|hstu", line, re.IGNORECASE)
    ]
    assert naming == []


@pytest.mark.parametrize(
    "source",
    [
        "import dlrm_bench.dlrm.zoo.models",
        "from dlrm_bench.dlrm import dcnv2",
        "from dlrm_bench.dlrm.dcnv2.config import ModelConfig",
        "def f():\n    from torchrec.models.dlrm import DLRM",
        "import_module('dlrm_bench.dlrm.dlrmv4.model')",
    ],
)
def test_the_check_sees_every_import_of_a_model(source):
    assert models_imported(ast.parse(source)) != []
    assert models_imported(ast.parse("from dlrm_bench.dlrm.benchmarks import named\nimport torchrec")) == []


def test_modules_are_imported_by_one_name():
    """pip installs dlrm_bench alone: `import bench` would work in a checkout and nowhere else."""
    for path in FILES:
        names = [name for name in imports_of(path) if name.split(".")[0] in FLOORS]
        assert names == [], path


def outside(path: Path, product: Path, names: Iterable[str]) -> list[str]:
    """Modules of ours that a file of a product, which imports these names, imports from outside of it."""
    depth = len(path.relative_to(product).parts)  # dots that stay within it
    found = []
    for name in names:
        dots = len(name) - len(name.lstrip("."))
        if name.split(".")[0] in (PACKAGE, *FLOORS) or dots > depth:
            found.append(name)
    return found


def files_of(product: str) -> list[Path]:
    return [path for path in FILES if path.is_relative_to(ROOT / product)]


@pytest.mark.parametrize("product", APART)
def test_a_product_imports_nothing_of_the_rest(product):
    assert len(files_of(product)) > 4
    for path in files_of(product):
        assert outside(path, ROOT / product, imports_of(path)) == [], path


def test_the_check_sees_what_lies_outside_of_a_product():
    product = ROOT / "bench" / "doctor"
    for source in ("from dlrm_bench.bench import ROOT", "from .. import ROOT", "from ..report.plots import WIDTH"):
        assert outside(product / "frames.py", product, imported(ast.parse(source))) != []
    assert outside(product / "frames.py", product, imported(ast.parse("from .rank_file import Frame"))) == []


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_has_its_front_page_version_and_changes(product):
    folder = ROOT / product
    (version,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((folder / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    assert f"\n## {version}\n" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"pip install ./{product}" in (folder / "README.md").read_text(encoding="utf-8")


def test_relative_imports_are_the_products_alone():
    products = {path for product in APART for path in files_of(product)}
    for path in FILES:
        if path not in products:
            assert [name for name in imports_of(path) if name.startswith(".")] == [], path


@pytest.mark.parametrize("room", ["records", "stats", "compare", "report", "history"])
def test_what_reads_records_imports_neither_torch_nor_what_drives_gpus(room):
    """In a process of its own; a laptop compares and reports without them."""
    files = [path for path in sorted((ROOT / "bench" / room).glob("*.py")) if path.stem != "bisect_command"]  # runs
    modules = [f"{PACKAGE}.bench.{room}.{path.stem}" for path in files]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r} + ['{PACKAGE}.bench.cli']:\n    importlib.import_module(name)\n"
        "print(*(name for name in ('torch', 'torchrec', 'fbgemm_gpu', 'triton', 'pynvml') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_package_links_to_each_floor():
    """And holds nothing else: whatever finds packages by folders finds every room, by one name."""
    there = {path.name: str(path.readlink()) for path in (ROOT / PACKAGE).iterdir() if path.is_symlink()}
    assert there == {floor: f"../{floor}" for floor in FLOORS}
    beside = {path.name for path in (ROOT / PACKAGE).iterdir()} - {"__pycache__", "py.typed"}
    assert beside - set(there) == {"__init__.py"}


def test_every_folder_of_modules_is_a_package():
    """A folder without __init__.py would be missing after `pip install`."""
    assert [path.parent for path in FILES if not path.with_name("__init__.py").exists()] == []


def test_nothing_outside_the_tests_imports_them():
    for path in FILES:
        assert not [name for name in imports_of(path) if name.split(".")[0] == "tests"], path


def training_calls(tree: ast.AST) -> int:
    """Calls of train_step, but for those of a pipeline that wraps another one and passes its own train_step on, and for
    those of a warm-up, after which weights are as before."""
    if isinstance(tree, ast.FunctionDef) and tree.name in ("train_step", "warm_up"):
        return 0
    own = isinstance(tree, ast.Call) and called(tree) == "train_step"
    return own + sum(training_calls(node) for node in ast.iter_child_nodes(tree))


def test_only_bench_run_trains():
    calls = {path.relative_to(ROOT).as_posix(): training_calls(ast.parse(path.read_text())) for path in FILES}
    assert {path: count for path, count in calls.items() if count} == {"bench/run.py": 1}


def test_files_fit_a_head():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in FILES}
    assert {path: length for path, length in lengths.items() if length > 400} == {}
    assert lengths["launch/dlrm.py"] < 100
