"""Checks the form of a record's configuration: each field is one of a run's, with a value of the field's type.

A record may come from anybody, and its configuration becomes the command line of a rerun. Invalid values are refused
here, before code of any commit reads them.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dlrm_bench.bench.config import PIPELINES, RunConfig
from dlrm_bench.dlrm.benchmarks import benchmark_of

_OF_A_RECORD = {"world_size": int, "global_batch_size": int}
"""Keys of a record's configuration in addition to the fields of RunConfig."""


def check_config(file: Path, config: dict[str, Any]) -> None:
    """Checks the configuration of a record, as `upgraded` returns it. ValueError, naming the file and the field, if a
    field is unknown to this version, or has an invalid value."""
    wrong = next(_wrong(config), None)
    if wrong is not None:
        raise ValueError(f"{file}: config.{wrong}: this record cannot be repeated")


def _wrong(config: dict[str, Any]) -> Iterator[str]:
    options = config["pipeline"]
    if options["name"] not in PIPELINES:
        yield f"pipeline.name is {options['name']!r}, expected one of {', '.join(PIPELINES)}"
        return
    yield from _wrong_fields({k: v for k, v in options.items() if k != "name"}, PIPELINES[options["name"]], "pipeline.")
    for name, kind in _OF_A_RECORD.items():
        if name not in config:
            yield f"{name} is missing"
        elif (text := _expected(config[name], kind)) is not None or config[name] < 1:
            yield f"{name} is {config[name]!r}, expected {text or 'a positive number'}"
    if "preset" not in config:
        yield "preset is missing"
    benchmark = benchmark_of(config)
    if benchmark is None:
        yield f"benchmark is {config.get('benchmark')!r}, which this version does not know"
        return
    others = {name: value for name, value in config.items() if name != "pipeline" and name not in _OF_A_RECORD}
    yield from _wrong_fields(others, RunConfig, "", benchmark.option_types)


def _wrong_fields(
    values: dict[str, Any], form: type, prefix: str, blocks: Mapping[str, type] = MappingProxyType({})
) -> Iterator[str]:
    """Yields a sentence about each value that is not a field of the dataclass, or not of the field's type. blocks:
    types of fields whose type the form leaves open."""
    hints = {**get_type_hints(form), **blocks}
    for name, value in values.items():
        if name not in hints or name not in {field.name for field in dataclasses.fields(form)}:
            yield f"{prefix}{name!a} is not a field that this version knows"
        elif dataclasses.is_dataclass(hints[name]):
            if isinstance(value, dict):
                yield from _wrong_fields(value, hints[name], f"{prefix}{name}.")
            else:
                yield f"{prefix}{name} is {value!r}, expected an object"
        elif (expected := _expected(value, hints[name])) is not None:
            yield f"{prefix}{name} is {value!r}, expected {expected}"


def _expected(value: Any, kind: Any) -> str | None:
    """Returns the JSON values that a field of this type takes, in words; None if `value` is one."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        texts = [None if value is None and one is type(None) else _expected(value, one) for one in arguments]
        return None if None in texts else " or ".join(str(text) for text in texts)
    if get_origin(kind) is Literal:
        return None if value in arguments and type(value) in map(type, arguments) else f"one of {arguments}"
    if get_origin(kind) is tuple:
        fits = isinstance(value, list) and all(_expected(each, arguments[0]) is None for each in value)
        return None if fits else f"a list, each {_expected(None, arguments[0])}"
    return None if _is(value, kind) else _WORDS[kind]


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text that does not begin with a dash",
    Path: "a path that does not begin with a dash",
    type(None): "null",
}


def _is(value: Any, kind: type) -> bool:
    if kind is bool or value is None:
        return isinstance(value, bool) and kind is bool
    if kind in (int, float):
        fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return fits and (isinstance(value, int) or math.isfinite(value))
    # Behind a flag, a text with a dash would be taken for another flag.
    return kind in (str, Path) and isinstance(value, str) and not value.startswith("-")
