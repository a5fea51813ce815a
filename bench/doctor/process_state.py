"""The doctor's knowledge of this process, which its hook, its marks and its examination share."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from .site_folder import Settings

OPTIMIZER, PROGRESS, MARK = "optimizer", "progress", "mark"
"""Ways in which an iteration is found, the least reliable first."""

Marker = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Iterations(Protocol):
    """The examination of a rank, as the hook sees it (rank.py)."""

    def boundary(self, found_by: str) -> None:
        """Takes note that an iteration begins."""


class ProcessState:
    """The doctor's state in this process; empty before the script's first iteration."""

    settings: Settings | None = None
    examination: Iterations | None = None
    marker: Marker | None = None
    """Set while calls are recorded: runs a wrapped function."""
    around_backward: Callable[[], Any] | None = None
    """Set while calls are recorded: a context for autograd's engine, which torch's override protocol leaves out."""
    inside_progress = threading.local()
    pipeline: Any = None
    """The pipeline whose progress() ran last, held weakly: a call that gives it, or None."""
    leader: int | None = None
    """The optimizer whose steps are iterations, by id: the first one that made a step."""
    alarmed = False
    """Whether the script has ever set a handler of SIGALRM, such as for a limit of time of each of its steps."""


state = ProcessState()


def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, whose calls are reported to the marker while there is one."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        marker = state.marker
        return function(*args, **kwargs) if marker is None else marker(name, function, args, kwargs)

    return call
