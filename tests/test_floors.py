"""The house rules that a reader of the tree relies on: who may import whom, one training loop, short files."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"kernels": 1, "dlrm": 2, "pipeline": 3, "bench": 4, "launch": 5}
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in a file, also inside functions, also by importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides the floor"
            yield node.module or ""
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            argument = node.args[0]
            assert isinstance(argument, ast.Constant), "an import that cannot be read"
            yield str(argument.value)


def called(call: ast.Call) -> str:
    """The last name of what is called: `f` of f(), a.f() and a.b.f()."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def higher_floors(path: Path, tree: ast.AST) -> list[str]:
    floor = FLOORS[path.parts[0]]
    return [name for name in imported(tree) if FLOORS.get(name.split(".")[0], 0) > floor]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_imports_from_a_higher_floor(path):
    assert higher_floors(path.relative_to(ROOT), ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import bench.run",
        "from bench.run import run",
        "def f():\n    from bench import run",
        "import_module('bench.run')",
    ],
)
def test_the_check_sees_every_form_of_import(source):
    assert higher_floors(Path("dlrm/model.py"), ast.parse(source)) != []
    assert higher_floors(Path("launch/dlrm.py"), ast.parse(source)) == []


def test_nothing_outside_the_tests_imports_them():
    for path in FILES:
        assert not [name for name in imported(ast.parse(path.read_text())) if name.split(".")[0] == "tests"], path


def training_calls(tree: ast.AST) -> int:
    """Calls of train_step, but for those of a pipeline that wraps another one and passes its own train_step on."""
    if isinstance(tree, ast.FunctionDef) and tree.name == "train_step":
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
