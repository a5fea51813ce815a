"""The JSON files of runs, ladders and limits: reading and writing them, and checking their form."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import IO, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

_WAY_OUT = "restore the file or leave it out"
T = TypeVar("T")
_LINE = 160
"""Number of columns of a line of `json_text`."""


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file. ValueError, naming file and position, if it is corrupt; OSError if it cannot
    be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is corrupt at line {error.lineno} column {error.colno}: {error.msg}; {_WAY_OUT}"
        ) from error
    except RecursionError:
        raise ValueError(f"{path} is corrupt: nested too deeply; {_WAY_OUT}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is corrupt at byte {error.start}: not UTF-8; {_WAY_OUT}") from error


def read_form(path: Path, form: type[T], schemas: Sequence[int], way_out: str) -> T:
    """Returns the content of a JSON file of a form that check_form accepts. ValueError names the file and, if it cannot
    be read, `way_out`."""
    try:
        content: Any = read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {way_out}") from error
    check_form(path, content, form, schemas)
    return cast(T, content)


def json_text(value: Any, indent: int = 0) -> str:
    """Returns JSON without spaces, with as many values in a line as fit into 160 columns.

    A flat list is always on one line, and each value of the outermost object begins a line. A record takes half the
    bytes of json.dumps(indent=2), and is easier to read. ValueError for a number that JSON cannot hold.
    """
    line = _json_line(value)
    flat = isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)
    if not isinstance(value, dict | list) or flat or indent + len(line) <= _LINE:
        return line
    if isinstance(value, dict):
        items = [f"{_json_line(str(name))}:{json_text(item, indent + 1)}" for name, item in value.items()]
    else:
        items = [json_text(item, indent + 1) for item in value]
    if indent:
        items = _filled(items, _LINE - indent - 2)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    inside = ",\n".join(" " * (indent + 1) + item for item in items)
    return f"{opening}\n{inside}\n{' ' * indent}{closing}"


def write_whole(path: Path, text: str) -> None:
    """Writes the text and a line end in one step: where that fails, as on a full disk, the file stays as it was."""
    with whole_file(path) as file:
        # A path that is not UTF-8 has surrogates, which JSON writes as escapes.
        file.write(f"{text}\n".encode(errors="backslashreplace"))


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields an empty file that becomes `path` in one step at the end; where that fails, `path` stays as it was."""
    path = path.resolve()  # a link keeps leading there
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, unfinished)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _json_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _filled(items: Sequence[str], columns: int) -> list[str]:
    """Joins adjacent items into lines of at most `columns` columns; an item of several lines stays alone."""
    lines: list[str] = []
    for item in items:
        joined = f"{lines[-1]},{item}" if lines else item
        if lines and "\n" not in joined and len(joined) <= columns:
            lines[-1] = joined
        else:
            lines.append(item)
    return lines


def check_form(path: Path, content: Any, form: type, schemas: Sequence[int]) -> None:
    """Checks that the content of a JSON file is of a known schema and has all fields of a TypedDict, at all levels.

    form: the TypedDict; its annotations may hold TypedDicts, lists, dicts, literals, plain types, `| None` and Any.
    schemas: the values of the field `schema` that this version reads. Fields that `form` does not name are allowed.
    ValueError, naming the file and the fields.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: expected an object, found {type(content).__name__}; {_WAY_OUT}")
    if content.get("schema") not in schemas:
        raise ValueError(
            f"{path} has schema {content.get('schema')!r}; this version reads {' and '.join(map(str, schemas))}: "
            "use the version of the harness that wrote it"
        )
    missing, wrong = list(_missing(content, form, "")), list(_wrong(content, form, ""))
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: {_WAY_OUT}")
    if wrong:
        raise ValueError(f"{path}: {wrong[0]}; {_WAY_OUT}")


def _missing(value: Any, kind: Any, field: str) -> Iterator[str]:
    """Yields the path of each missing required field."""
    kind = _without_none(kind)
    if is_typeddict(kind) and isinstance(value, dict):
        yield from (_join(field, name) for name in _hints(kind) if name in kind.__required_keys__ and name not in value)
    for name, inner, inner_kind in _inner(value, kind, field):
        yield from _missing(inner, inner_kind, name)


def _wrong(value: Any, kind: Any, field: str) -> Iterator[str]:
    """Yields a sentence about each value of a wrong type, and each number that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{field} is {value}, which JSON cannot hold"
    elif not _has_type(value, kind):
        expected = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
        yield f"{field} is {value!r}, expected {expected}"
    for name, inner, inner_kind in _inner(value, kind, field):
        yield from _wrong(inner, inner_kind, name)


def _inner(value: Any, kind: Any, field: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields path, value and type of each value within a value; the type is Any if it is unknown."""
    kind = _without_none(kind)
    arguments = get_args(kind)
    if isinstance(value, dict):
        hints = _hints(kind) if is_typeddict(kind) else {}
        other = arguments[1] if get_origin(kind) is dict else Any
        yield from ((_join(field, str(name)), inner, hints.get(name, other)) for name, inner in value.items())
    elif isinstance(value, list | tuple):
        of_each = arguments[0] if get_origin(kind) is list else Any
        yield from ((f"{field}[{i}]", inner, of_each) for i, inner in enumerate(value))


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotation's type, regardless of its inner values."""
    if kind is Any or (value is None and type(None) in get_args(kind)):
        return True
    kind = _without_none(kind)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, dict if is_typeddict(kind) else get_origin(kind) or kind)


def _without_none(kind: Any) -> Any:
    """Returns the type without None: X of X | None."""
    if get_origin(kind) in (Union, UnionType):
        return next(argument for argument in get_args(kind) if argument is not type(None))
    return kind


@cache
def _hints(form: Any) -> dict[str, Any]:
    return get_type_hints(form)


def _join(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name
