"""Flags of launch/dlrm.py: the run's own, and those of the pipeline that --pipeline names."""

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import tyro

from dlrm_bench.bench.config import PIPELINES, RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.benchmarks import PRESETS
from dlrm_bench.dlrm.runtime.parsed import parsed


def known_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the values of the parser's flags, and all other words. ValueError names a flag with a bad value.

    parser: made with exit_on_error=False: it would end the process with its usage, which lists its own flags alone.
    """
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}") from None


def parse_run(preset_name: str, pipeline: str, arguments: Sequence[str], text: str, prints: bool) -> RunConfig:
    """Returns the configuration of a preset, a pipeline and further flags; exits after --help.

    text: begins the help. prints: whether this process prints the help. ValueError names a bad flag, in one line.
    """
    if pipeline not in PIPELINES:
        raise ValueError(f"--pipeline {pipeline!r} is unknown: choose one of {', '.join(PIPELINES)}")
    default = replace(preset(preset_name), pipeline=PIPELINES[pipeline]())
    _refuse_flags_of_other_pipelines(pipeline, arguments)
    presets = "\n\n".join(f"{name}: {each.text}" for name, (_, each) in PRESETS.items())
    text = f"{text}\n\nPresets\n\n{presets}"
    kinds = tuple(type(options) for options in (default.model, default.data, default.optimizer))
    narrowed: Any = RunConfig[kinds]  # type: ignore[valid-type]  # so that tyro sees the fields of this benchmark's
    kind: Any = tyro.conf.AvoidSubcommands[narrowed]  # type: ignore[misc]
    cli = partial(tyro.cli, kind, default=default, args=arguments, description=text)
    return cast(RunConfig, parsed(cli, prints))


def _refuse_flags_of_other_pipelines(pipeline: str, arguments: Sequence[str]) -> None:
    own = {field.name for field in fields(PIPELINES[pipeline])}
    for argument in arguments:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        owners = [other for other, options in PIPELINES.items() if name in {field.name for field in fields(options)}]
        if flag.startswith("--") and owners and name not in own:
            raise ValueError(
                f"{flag} is an option of --pipeline {' and '.join(owners)}, not of {pipeline}: choose that or leave "
                "it out"
            )
