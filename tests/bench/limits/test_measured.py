"""What `dlrm-bench limits` does around its measurements. The measurements are in test_ceilings.py."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.limits import measured
from dlrm_bench.bench.machine.source import source_hash
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.json_file import read_json
from dlrm_bench.bench.records.limits import LIMITS_JSON, Ceiling
from dlrm_bench.dlrm.runtime.ranks import Ranks


def limits_of(ranks: Ranks, folder: Path, measure: Callable[..., Any]) -> Any:
    """Returns the limits of a preset that `measure` measures, with the id x; or the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "init_process_group", lambda _: None)  # done by run_ranks
        patch.setattr(measured, "ROOT", folder / "source")
        patch.setattr(measured, "measure", measure)
        try:
            return measured.run_limits(replace(preset("smoke"), results_dir=folder, run_id="x"), ranks, "")
        except (ValueError, OSError) as error:
            return str(error)


def nothing_measured(*_: Any) -> Iterator[Ceiling]:
    pytest.fail("measured before its folder was there")


def test_a_folder_that_exists_is_refused_on_every_rank_before_anything_is_measured(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "x").mkdir()
    said = run_ranks(2, limits_of, tmp_path, nothing_measured)
    assert said[0] == said[1]
    assert "records are never overwritten: choose another --run-id" in said[0]


def edited(ranks: Ranks, folder: Path) -> tuple[str, Any]:
    """Returns the program's hash, and its limits by a measurement during which a file changes."""
    file = folder / "source" / "bench" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("1")
    before = source_hash(folder / "source")

    def measure(*_: Any) -> Iterator[Ceiling]:
        file.write_text("2")
        yield Ceiling(name="work", stage=None, ms=1.0, amount=1.0, unit="B")

    return before, limits_of(ranks, folder, measure)


def test_the_program_is_that_of_before_the_measurement(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    ((before, limits),) = run_ranks(1, edited, tmp_path)
    assert limits["git"]["source"] == before
    assert read_json(tmp_path / "x" / LIMITS_JSON) == limits


def failed(ranks: Ranks, folder: Path) -> tuple[list[bool], Any]:
    """Returns whether the folder was there when a measurement failed, and its error."""
    there = []

    def measure(*_: Any) -> Iterator[Ceiling]:
        there.append((folder / "x").is_dir())
        raise OSError("the device is gone")

    return there, limits_of(ranks, folder, measure)


def test_a_measurement_that_fails_leaves_no_folder(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert run_ranks(1, failed, tmp_path) == [([True], "the device is gone")]
    assert not (tmp_path / "x").exists()
