"""The folder that a report is written to: only files that an earlier report wrote are replaced or removed."""

import json
from collections.abc import Mapping
from pathlib import Path

from dlrm_bench.bench.records.json_file import read_json, write_whole

MANIFEST = "report.json"
"""Name of the file that lists a report's files."""


def check_output(out: Path) -> None:
    """Raises ValueError if `out` is not a folder, or if its manifest cannot be read."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder after --out")
    _written_before(out)


def write_files(out: Path, files: Mapping[str, bytes]) -> list[str]:
    """Writes `files` by name into `out` and removes files of an earlier report that are not among them.

    Returns the names of all other files in `out`, which are left alone. ValueError, before anything is written, if one
    of them has the name of a file of the report.
    """
    check_output(out)
    out.mkdir(parents=True, exist_ok=True)
    before = _written_before(out)
    others = sorted(path.name for path in out.iterdir() if path.name not in {*before, MANIFEST})
    if taken := [name for name in others if name in files]:
        raise ValueError(
            f"{out / taken[0]} was not written by `dlrm-bench report` and is left as it is: move it, or choose another "
            "--out"
        )
    # Listed before they are written, so that the next report recognises the files of an interrupted one.
    _write_manifest(out, before | files.keys())
    for name in before - files.keys():
        (out / name).unlink(missing_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
    _write_manifest(out, set(files))
    return others


def _written_before(out: Path) -> set[str]:
    path = out / MANIFEST
    if not path.exists():
        return set()
    manifest = read_json(path)
    names = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ValueError(f"{path} is not the manifest of a report: choose another --out")
    return set(names)


def _write_manifest(out: Path, names: set[str]) -> None:
    write_whole(out / MANIFEST, json.dumps({"written_by": "dlrm-bench report", "files": sorted(names)}, indent=2))
