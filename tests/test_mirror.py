"""Tests mirror the tree: a test file stands where its module does, or says first that it is cross-cutting."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = sorted(
    path for folder in ("dlrm", "kernels", "pipeline") for path in (ROOT / "tests" / folder).rglob("test_*.py")
)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_test_file_has_a_module_or_says_that_it_is_cross_cutting(path: Path) -> None:
    module = ROOT / path.parent.relative_to(ROOT / "tests") / path.name.removeprefix("test_")
    cross_cutting = path.read_text().startswith('"""Cross-cutting: ')
    assert module.is_file() != cross_cutting, f"{path}: neither or both of a module {module} and the mark of many"
