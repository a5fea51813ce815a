"""What the READMEs promise: links that lead somewhere, flags that exist, an example that runs."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_bench.bench.config import PIPELINES, RunConfig

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", ROOT / "results" / "README.md"]
OURS = 'pipeline = FiveStagePipeline(model, optimizer, device, FiveStageOptions(cuda_graph="dense"))'
STOCK = "pipeline = TrainPipelineSparseDist(model, optimizer, device)"
CLOSE = "pipeline.close()"


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(readme: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", readme.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if "://" not in link and not (readme.parent / link).exists()] == []


def test_switches_exist() -> None:
    tables = [line for line in READMES[0].read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    flags = {flag for line in tables for flag in re.findall(r"`--([a-z][a-z0-9-]*)", line.split("|")[1])}
    owners = (RunConfig, *PIPELINES.values())
    fields = {field.name.replace("_", "-") for owner in owners for field in dataclasses.fields(owner)}
    assert len(flags) > 10
    assert {flag.removeprefix("no-") for flag in flags} <= fields


def losses(script: Path) -> list[str]:
    """What the two ranks print."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(3):
        output = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=300)
        # Threads of torch's abort the end of a plain script now and then, stock TorchRec's too.
        if "terminate called without an active exception" not in output.stderr:
            break
    assert output.returncode == 0, output.stderr
    return sorted(re.findall(r"rank \d: \d\.\d{6}", output.stdout))  # two ranks may write into one line


def test_the_example_prints_what_stock_torchrec_prints(tmp_path: Path) -> None:
    """With the two lines changed that the text says, and nothing else."""
    readme = READMES[0].read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    text = " ".join(readme.split())
    theirs, ours = STOCK.removeprefix("pipeline = "), OURS.removeprefix("pipeline = ")
    assert f"Two lines are ours. With `{theirs}` in the place of `{ours}`, and without `{CLOSE}`" in text
    lines = example.splitlines()
    (called,), (closed,) = ([n for n, line in enumerate(lines) if line.startswith(start)] for start in (OURS, CLOSE))
    assert lines[called] == OURS
    lines[called], lines[closed] = STOCK, ""
    printed = []
    for name, text in {"ours": example, "stock": "\n".join(lines)}.items():
        script = tmp_path / f"{name}.py"
        script.write_text(text, encoding="utf-8")
        printed.append(losses(script))
    assert len(printed[0]) == 2
    assert printed[0] == printed[1]
