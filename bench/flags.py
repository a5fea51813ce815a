"""Flags of launch/dlrm.py: the run's own, and those of the pipeline that --pipeline names."""

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import tyro

from dlrm_bench.bench.config import PIPELINES, RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.benchmarks import PRESETS


def parse_run(preset_name: str, pipeline: str, arguments: Sequence[str], text: str, prints: bool) -> RunConfig:
    """Returns the configuration of a preset, a pipeline and further flags; exits after --help.

    text: begins the help. prints: whether this process prints the help. ValueError names a bad flag, in one line.
    """
    if pipeline not in PIPELINES:
        raise ValueError(f"--pipeline {pipeline!r} is unknown: choose one of {', '.join(PIPELINES)}")
    default = replace(preset(preset_name), pipeline=PIPELINES[pipeline]())
    _refuse_flags_of_other_pipelines(pipeline, arguments)
    presets = "\n".join(f"{name}: {each.text}" for name, (_, each) in PRESETS.items())
    text = f"{text}\n\nPresets\n\n{presets}"
    kinds = tuple(type(options) for options in (default.model, default.data, default.optimizer))
    narrowed: Any = RunConfig[kinds]  # type: ignore[valid-type]  # so that tyro sees the fields of this benchmark's
    kind: Any = tyro.conf.AvoidSubcommands[narrowed]  # type: ignore[misc]
    cli = partial(tyro.cli, kind, default=default, args=arguments, description=text)
    return cast(RunConfig, _parsed(cli, prints))


def _parsed(cli: Callable[[], Any], prints: bool) -> Any:
    """Returns the result of tyro; its page about a wrong flag becomes a ValueError."""
    page = io.StringIO()
    try:
        quiet = contextlib.nullcontext() if prints else contextlib.redirect_stdout(io.StringIO())
        with contextlib.redirect_stderr(page), quiet:
            return cli()
    except SystemExit as leave:
        if not leave.code:
            raise
        raise ValueError(_in_one_line(page.getvalue())) from None


def _in_one_line(page: str) -> str:
    """Returns the error of tyro's page: sections with rules between them, in a frame with the title or below the title.

    Of tyro's suggestions only the flags are kept; their help, and how to get all help, are left out.
    """
    lines = [line.strip("│┃ ") for line in page.splitlines() if not line.startswith(("╭", "╰"))]
    sections = [part.split("\n") for part in re.split("^[-─━]{3,}$", "\n".join(lines), flags=re.MULTILINE)]
    said, *others = sections if "╭" in page else sections[1:]
    meant = [
        line.split()[0] for section in others if "Perhaps you meant:" in section for line in section if line[:2] == "--"
    ]
    error = " ".join(filter(None, said)).removeprefix("Error parsing RunConfig: ")
    return f"{error}; perhaps you meant {' or '.join(meant)}" if meant else error


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
