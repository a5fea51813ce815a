"""The flame graph of the loop's samples as a self-contained SVG, outermost frames on top."""

from dataclasses import dataclass, field
from html import escape

from .frames import Frames, short_path
from .rank_file import Frame, RankFile
from .samples import Samples

_WIDTH, _ROW, _FONT = 1040, 18, 11
"""Pixels."""
_LETTER = 6.4
"""Pixels of a letter of the font, about."""
_LEAST = 0.002
"""Share of the samples' time below which a box is left out."""
_DEPTH = 24
"""Rows."""
_SCRIPT, _LIBRARY, _ALL = "#e8b06a", "#c4d7e6", "#e4e8ec"


@dataclass(slots=True)
class Box:
    """A line of the script, or a function of a library, with all that it calls."""

    name: str
    color: str
    ms: float = 0.0
    inner: dict[str, "Box"] = field(default_factory=dict)


def tree_of(rank: RankFile) -> Box:
    """Time of an iteration by stack. Frames that hold every sample, those above the training loop, are left out."""
    samples, frames = Samples(rank), Frames(rank["libraries"])
    paths = [[_named(frame, frames, rank) for frame in reversed(stack)] for stack in samples.stacks]
    taken = {sample.stack for sample in samples.samples}
    above = _common([[name for name, _ in paths[stack]] for stack in taken])
    root = Box(f"an iteration of rank {rank['rank']}", _ALL)
    for sample in samples.samples:
        box, ms = root, sample.ms / samples.iterations
        box.ms += ms
        for name, color in paths[sample.stack][above:]:
            box = box.inner.setdefault(name, Box(name, color))
            box.ms += ms
    return root


def svg(root: Box) -> str:
    """Returns the picture; a box shows its whole name and its time under the pointer. Empty without samples."""
    if not root.ms:
        return ""
    boxes: list[str] = []
    depth = _draw(boxes, root, 0.0, 0, root.ms)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {(depth + 1) * _ROW}" role="img" aria-label="Flame graph of the training loop" '
        f'font-size="{_FONT}" font-family="ui-monospace, monospace">'
        f"{''.join(boxes)}</svg>"
    )


def _draw(boxes: list[str], box: Box, left: float, depth: int, whole: float) -> int:
    """Appends the boxes from this one on, most time first; returns the deepest row."""
    width = box.ms / whole * _WIDTH
    letters = int((width - 6) / _LETTER)
    shown = box.name if len(box.name) <= letters else box.name[: letters - 1] + "…" if letters > 3 else ""
    y = depth * _ROW
    title = escape(f"{box.name}: {box.ms:.3f} ms, {box.ms / whole:.1%}")
    text = f'<text x="{left + 3:.1f}" y="{y + _ROW - 6}">{escape(shown)}</text>' if shown else ""
    boxes.append(
        f'<g><title>{title}</title><rect x="{left:.1f}" y="{y}" width="{max(width - 0.5, 0.5):.1f}" '
        f'height="{_ROW - 1}" fill="{box.color}"/>{text}</g>'
    )
    deepest = depth
    for inner in sorted(box.inner.values(), key=lambda inner: -inner.ms):
        if inner.ms >= _LEAST * whole and depth + 1 < _DEPTH:
            deepest = max(deepest, _draw(boxes, inner, left, depth + 1, whole))
        left += inner.ms / whole * _WIDTH
    return deepest


def _named(frame: Frame, frames: Frames, rank: RankFile) -> tuple[str, str]:
    where = short_path(frame["file"], rank["libraries"])
    if frames.is_library(frame):
        return f"{frame['function']} ({where})", _LIBRARY
    return f"{where}:{frame['line']} {frame['function']}: {frame['text']}", _SCRIPT


def _common(paths: list[list[str]]) -> int:
    """Number of outermost names that all paths share."""
    shared = 0
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        shared += 1
    return min(shared, *(len(path) - 1 for path in paths)) if paths else 0
