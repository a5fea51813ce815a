"""Each reason is given by the code, and stands on the page once."""

import ast
from pathlib import Path

import pytest

from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.reasons import SECTIONS, Reason

FOLDER = Path(reasons.__file__).parent
ALL = {name: value for name, value in vars(reasons).items() if isinstance(value, Reason)}


def test_every_reason_is_on_the_page_once() -> None:
    on_page = [reason.text for section in SECTIONS for reason in section.reasons]
    assert sorted(on_page) == sorted(reason.text for reason in ALL.values())


@pytest.mark.parametrize("name", ALL)
def test_every_reason_is_given_somewhere(name: str) -> None:
    assert any(f"reasons.{name}(" in path.read_text() for path in FOLDER.rglob("*.py"))


@pytest.mark.parametrize("module", ["iteration_obstacles", "graph_obstacles"])
def test_obstacles_are_told_by_reasons_alone(module: str) -> None:
    """What a function that says why returns is a reason's text: a sentence of its own would not be on the page."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    whys = [
        one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name not in ("refusal", "runs_in_graphs")
    ]
    returned = [one.value for why in whys for one in ast.walk(why) if isinstance(one, ast.Return) and one.value]
    assert len(returned) > 10
    assert not [
        ast.unparse(value)
        for value in returned
        if isinstance(value, ast.JoinedStr | ast.Constant) and value_text(value)
    ]


def value_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))
