"""The owner of a line: the user's frame and the library's frame of a stack."""

import os
import re
from collections.abc import Collection, Sequence
from functools import cache

from .rank_file import Frame
from .site_folder import TOP

_OURS = tuple(f"{folder.resolve()}{os.sep}" for folder in (TOP, *TOP.iterdir()) if folder.is_dir())
"""Folders of the package that the doctor is part of; those within it may be links."""
_STANDARD = re.compile(r"/lib/python3\.\d+/[\w/]+\.py$")
_TORCH = f"{os.sep}torch{os.sep}"


class Frames:
    """Tells the files of libraries from the user's own."""

    def __init__(self, libraries: Sequence[str]) -> None:
        """libraries: folders of installed packages and of Python's own modules."""
        self._folders = (*(f"{folder}{os.sep}" for folder in libraries), *_OURS)

    def is_library(self, frame: Frame) -> bool:
        """Whether the frame belongs to an installed package, to Python, or to this project."""
        return frame["file"].startswith("<") or _real(frame["file"]).startswith(self._folders)

    def user(self, stack: Sequence[Frame]) -> Frame:
        """Returns the user's frame nearest to the call; the outermost frame of all where the user has none."""
        return next((frame for frame in stack if not self.is_library(frame)), stack[-1])

    def library(self, stack: Sequence[Frame]) -> list[Frame]:
        """Returns the library's frame nearest to the call, below the user's, and the one that called it.

        Frames of torch itself only where there are no others; none where the user's line makes the call.
        """
        below = []
        for frame in stack:
            if not self.is_library(frame):
                break
            below.append(frame)
        # If no frame is the user's, the outermost frame counts as the user's.
        below = [frame for frame in below if frame is not self.user(stack)]
        return ([frame for frame in below if not is_torch(frame)] or below)[:2]


def is_ours(frame: Frame) -> bool:
    """Whether the frame belongs to the project that the doctor is part of."""
    return _real(frame["file"]).startswith(_OURS)


def is_torch(frame: Frame) -> bool:
    """Whether the frame is of torch itself, or of Python's own modules that it calls through."""
    return _TORCH in frame["file"] or is_standard_library(frame)


def is_standard_library(frame: Frame) -> bool:
    """Whether the frame is of Python's own modules."""
    return frame["file"].startswith("<frozen") or _STANDARD.search(frame["file"]) is not None


def short_path(file: str, libraries: Collection[str] = ()) -> str:
    """Returns a path for text: from the package on for installed ones, from the working directory on below it."""
    real = _real(file)
    for folder in (*sorted(libraries, key=len, reverse=True), os.getcwd(), str(TOP.resolve().parent)):
        if real.startswith(folder + os.sep):
            return os.path.relpath(real, folder)
    return real


@cache
def _real(file: str) -> str:
    return os.path.realpath(file)
