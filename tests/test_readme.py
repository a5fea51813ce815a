"""The READMEs' promises: links that exist, flags that exist, an example that runs."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from dlrm_bench.bench.config import PIPELINES, RunConfig
from dlrm_bench.bench.flags import parse_run
from tests.launched import fork, run_script, wait

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ROOT / "pipeline" / "README.md"
OTHERS = ("bench", "results", "pipeline/five_stage", "pipeline/device_metrics")
READMES = [ROOT / "README.md", OPTIONS, *(ROOT / folder / "README.md" for folder in OTHERS)]
PAGES = [*READMES, ROOT / "results" / "LABBOOK.md", *sorted((ROOT / "results").glob("*/README.md"))]
EXAMPLE = ROOT / "examples" / "torchrec_script.py"


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not heading or heading in headings(target / "README.md" if target.is_dir() else target))


@pytest.mark.parametrize("readme", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(readme: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", readme.read_text(encoding="utf-8"))
    assert links or readme not in READMES
    assert [link for link in links if "://" not in link and not leads_somewhere(readme, link)] == []


def test_the_options_in_the_table_are_those_of_their_pipelines() -> None:
    table = [line.split("|") for line in OPTIONS.read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    assert len(table) > 10
    for _, options, pipelines, *_ in table:
        flag = re.findall(r"`--([a-z][a-z0-9-]*)", options)[0].removeprefix("no-").replace("-", "_")
        owners = (
            [RunConfig] if pipelines.strip() == "all" else [PIPELINES[name.strip()] for name in pipelines.split(",")]
        )
        assert all(flag in {field.name for field in dataclasses.fields(owner)} for owner in owners), flag


def test_all_options_of_the_pipelines_are_in_the_table() -> None:
    text = OPTIONS.read_text(encoding="utf-8")
    fields = {field.name for options in PIPELINES.values() for field in dataclasses.fields(options)}
    assert [name for name in sorted(fields) if not re.search(rf"`--(no-)?{name.replace('_', '-')}\b", text)] == []


def taken(arguments: list[str], flag: str, default: str) -> str:
    """The value of a flag, which is taken out of the arguments."""
    if flag not in arguments:
        return default
    place = arguments.index(flag)
    value = arguments[place + 1]
    del arguments[place : place + 2]
    return value


def test_the_flags_of_the_commands_are_understood() -> None:
    """Those of launch/dlrm.py which the README gives for GPUs, and for the small DLRMv4."""
    text = READMES[0].read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line, comments=True) for line in re.findall(r"launch/dlrm\.py (--preset .*)", text)]
    assert len(commands) == 10
    for arguments in commands:
        preset, pipeline = taken(arguments, "--preset", "smoke"), taken(arguments, "--pipeline", "torchrec")
        config = parse_run(preset, pipeline, arguments, None, False)
        assert (config.preset, config.pipeline.name) == (preset, pipeline)


def losses(folder: Path, *arguments: str) -> list[str]:
    """Returns the losses that the two ranks of the example print."""
    folder.mkdir()
    ended = wait(fork(2, folder, run_script, EXAMPLE, arguments), folder)
    assert ended.statuses == [0, 0], ended.outputs
    lines = sorted(line for output in ended.outputs for line in output.splitlines() if "c10d" not in line)
    assert [line for line in lines if not re.fullmatch(r"rank \d: \d\.\d{6}", line)] == []
    return lines


def test_the_example_prints_what_stock_torchrec_prints(tmp_path: Path) -> None:
    ours = losses(tmp_path / "ours")
    assert len(ours) == 2
    assert losses(tmp_path / "stock", "--stock") == ours


def test_the_example_refuses_a_flag_that_it_does_not_have(tmp_path: Path) -> None:
    ended = wait(fork(1, tmp_path, run_script, EXAMPLE, ["--stok"]), tmp_path)
    assert ended.statuses == [2]
    assert "error: unrecognized arguments: --stok" in ended.outputs[0]


def test_the_lines_in_the_readme_are_those_of_the_example() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", READMES[0].read_text(encoding="utf-8"), re.DOTALL)
    lines = {line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()}
    said = [line.removeprefix("# in place of: ") for line in block.splitlines() if line not in ("", "...")]
    assert [line for line in said if line not in lines] == []
    assert len(said) == 4
