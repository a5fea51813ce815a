"""Reasons why a path is not the file or directory that it should be."""

import os
from pathlib import Path


def why_not(path: Path) -> str:
    """Returns why a path is not of the kind wanted, to follow its name: 'does not exist', say.

    Path.exists and the like return False for a loop of links and for a directory that may not be entered, too.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "does not exist"
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    if path.is_dir():
        return "is a directory"
    return "is no directory" if path.is_file() else "is neither file nor directory"
