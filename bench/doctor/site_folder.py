"""The hook into an unchanged script: a folder on PYTHONPATH whose sitecustomize.py loads the hook.

The folder reaches every Python process below the command, whatever starts the process: torchrun, srun, a shell script,
a fork server. Rewriting the command line instead would require the flags of each launcher, and would change __main__.
Processes with Python's flags -E, -I or -S are not reached.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGE = __name__.rpartition(".")[0]
"""Name that the doctor is imported by: alone, or as a part of a larger package."""
TOP = Path(sys.modules[PACKAGE.partition(".")[0]].__path__[0])
"""Folder of the outermost package that the doctor is part of."""
SETTINGS = "HOST_DOCTOR"
"""Environment variable that holds the settings, as JSON; without it the hook does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The task of a rank."""

    folder: str
    """Folder of its files."""
    warmup: int
    """Iterations that nothing is measured in."""
    iterations: int
    """Iterations that are timed without instruments."""
    keep_running: bool
    """Go on with the script after the last measurement, instead of ending the process."""


def environment_with_hook(folder: Path, settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Python processes load the hook; makes `folder`, which must last as long as they do."""
    folder.mkdir(parents=True)
    loader = Path(__file__).with_name("sitecustomize.py").read_text(encoding="utf-8")
    assert "from . import hook" in loader
    (folder / "sitecustomize.py").write_text(
        loader.replace("from . import", f"from {PACKAGE} import"), encoding="utf-8"
    )
    # The package alone: the folder that holds it may hold modules that would hide the script's own.
    (folder / PACKAGE.partition(".")[0]).symlink_to(TOP.resolve(), target_is_directory=True)
    path = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(path), SETTINGS: json.dumps(asdict(settings))}


def belongs_to(process: int, folder: Path) -> bool:
    """Whether a process has settings that name the folder: in a container a rank's number may be another process's."""
    try:
        environment = Path("/proc", str(process), "environ").read_bytes()
    except OSError:
        return False
    return all(part in environment for part in (f"{SETTINGS}=".encode(), str(folder).encode()))


def settings_of(environment: Mapping[str, str]) -> Settings | None:
    """The settings that the doctor left in the environment, if it did."""
    text = environment.get(SETTINGS)
    return None if text is None else Settings(**json.loads(text))
