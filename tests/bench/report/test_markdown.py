"""Tables of Markdown files: which files, how they are found, and that the project's own are what its records say."""

from pathlib import Path

import pytest
from rich.console import Console

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.report.arguments import Tables
from dlrm_bench.bench.report.markdown import markdown_files, rendered
from tests.bench.made_records import recorded_runs, write
from tests.bench.records.full_disk import fails_after

ROOT = Path(__file__).resolve().parents[3]
OWN = [ROOT / "README.md", ROOT / "results"]
RUNS = recorded_runs()


def page(folder: Path, kind: str, *lines: str, body: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    comment = "\n".join((f"<!-- table: {kind}", *lines, "-->")) if lines else f"<!-- table: {kind} -->"
    path.write_text(f"# Words\n\n{comment}\n{body}<!-- end of table -->\n\nMore words.\n")
    return path


@pytest.mark.skipif(not (ROOT / "results").is_dir() or not list((ROOT / "results").glob("38-*")), reason="no records")
def test_the_tables_of_this_project_are_what_its_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", *map(str, OWN), "--check"]) == 0, capsys.readouterr().out
    assert "<!-- table: times" in (ROOT / "README.md").read_text()
    assert sum("<!-- table:" in path.read_text() for path in markdown_files(OWN)) > 30


def test_a_table_is_made_anew_and_everything_else_stays(tmp_path: Path) -> None:
    for name, i in (("slow", 0), ("fast", 1)):
        for run in range(2):
            write(tmp_path / name / str(run), RUNS[2 * i + run] * (1 - i / 2), minute=2 * run + (run ^ i))
    path = page(tmp_path, "times", "what | where | slow | fast", "words | . | slow | fast", body="| old |\n")
    text = rendered(path)
    before, _, after = path.read_text().partition("| old |\n")
    assert text.startswith(before)
    assert text.endswith(after)
    assert "| what | slow, ms | fast, ms | times as fast (95 % interval) | runs |" in text
    path.write_text(text)
    assert rendered(path) == text


def test_check_names_the_file_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "one", RUNS[0])
    path = page(tmp_path, "latencies", "what | path", "one | one", body="| typed by hand |\n")
    before = path.read_text()
    assert main(["tables", str(tmp_path), "--check"]) == 1
    assert f"{path}: differs from its records" in capsys.readouterr().out
    assert path.read_text() == before
    assert main(["tables", str(tmp_path)]) == 0
    assert "| one | 1 |" in path.read_text()
    assert main(["tables", str(tmp_path), "--check"]) == 0


def test_a_disk_that_is_full_leaves_the_text_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "one", RUNS[0])
    path = page(tmp_path, "latencies", "what | path", "one | one", body="| typed by hand |\n")
    before = path.read_text()
    with fails_after(60):
        Tables(files=(path,)).run(Console(quiet=True), [])
    assert path.read_text() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["README.md", "one"]


def test_files_of_a_folder_are_its_readme_and_those_below(tmp_path: Path) -> None:
    inner, outer, other = tmp_path / "a" / "README.md", tmp_path / "README.md", tmp_path / "other.md"
    inner.parent.mkdir()
    for path in (inner, outer, other):
        path.write_text("")
    assert markdown_files([tmp_path]) == [inner, outer]  # an index is made of the pages below it
    assert markdown_files([other]) == [other]
    with pytest.raises(ValueError, match="absent does not exist"):
        markdown_files([tmp_path / "absent"])
    (tmp_path / "empty").mkdir()
    for nothing in ([], [tmp_path / "empty"]):
        with pytest.raises(ValueError, match="name Markdown files, or folders of them"):
            markdown_files(nothing)  # otherwise a --check that checks nothing passes


@pytest.mark.parametrize(
    ("kind", "lines", "message"),
    [
        ("graphs", (), "kind 'graphs': choose one of times, sustained, rungs"),
        ("times", ("only | a | head | ing",), "table 'times': a heading and a line"),
        ("times", ("a | b | c | d", "too | few"), "expected 4 cells .* 'too | few'"),
        ("times", ("a | b | c | d", "words | . | x | y"), "table 'times': .*x does not exist"),
        ("rungs", ("some line",), "takes no lines"),
        ("rungs", (), "ladder.json cannot be read"),
        ("auc", ("no folder | a | b",), "no run a-0, a-1"),
    ],
)
def test_bad_tables_are_refused_by_file_and_kind(
    tmp_path: Path, kind: str, lines: tuple[str, ...], message: str
) -> None:
    path = page(tmp_path, kind, *lines)
    with pytest.raises(ValueError, match=message) as raised:
        rendered(path)
    assert str(raised.value).startswith(str(path))


def test_a_table_without_an_end_is_refused(tmp_path: Path) -> None:
    path = page(tmp_path, "rungs")
    path.write_text(path.read_text().replace("<!-- end of table -->", ""))
    with pytest.raises(ValueError, match="a table does not end"):
        rendered(path)
