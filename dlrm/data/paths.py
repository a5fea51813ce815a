"""Reasons why a path is not the file or directory that it should be."""

import os
from pathlib import Path


def why_not(path: Path) -> str:
    """Returns the reason why a path is not of the expected kind, to follow its name: 'does not exist', say.

    Path.exists and similar methods also return False for a loop of links and for an inaccessible directory.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "does not exist"
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    if path.is_dir():
        return "is a directory"
    return "is not a directory" if path.is_file() else "is neither a file nor a directory"
