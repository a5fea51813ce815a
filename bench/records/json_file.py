"""Reading the JSON files that runs, ladders and limits leave."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, way_out: str = "") -> Any:
    """What a JSON file holds. ValueError, naming file and position, if it is corrupt; OSError if it cannot be read.

    way_out: ends the error's text.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is corrupt at line {error.lineno} column {error.colno}: {error.msg}{way_out}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is corrupt at byte {error.start}: not UTF-8{way_out}") from error
