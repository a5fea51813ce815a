"""`dlrm-bench data` for the presets of DLRMv4: arguments by the preset's model, and the commands."""

from collections.abc import Sequence
from dataclasses import replace

from dlrm_bench.dlrm.dlrmv4.data.generate import GenerateConfig, smoke_config
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits
from dlrm_bench.dlrm.dlrmv4.presets import training


def main(what: str, preset: str | None, args: Sequence[str]) -> int:
    """Runs generate, preprocess, check, speed or rows; returns the exit status.

    generate: as many users, items, artists and albums as the preset's tables have rows for, histories as long as its
    model's, into its folder of data unless told. preprocess: histories as long as its model's.
    """
    from dlrm_bench.dlrm.dlrmv4.data import check, generate, named_rows, preprocess, speed

    assert preset is not None, "the default is another benchmark's"
    if what == "generate":
        return generate.main(args, generate_config(preset))
    if what == "preprocess":
        history = training(preset).model.max_history
        return preprocess.main(args if history == Limits().history else ["--history", str(history), *args])
    if what == "check":
        return check.main(args)
    if what == "speed":
        return speed.main(args)
    if what == "rows":
        return named_rows.main(args, training(preset).model)
    raise ValueError(f"dlrm-bench data {what} does not know --preset {preset}: DLRMv4's are generated, with labels")


def generate_config(preset: str) -> GenerateConfig:
    """Returns data for a preset's tables and histories."""
    of_preset = training(preset)
    model, out = of_preset.model, of_preset.data.path
    items, artists, albums, users, *_ = (rows - 1 for rows in model.rows)
    config = smoke_config(out) if preset == "smoke-dlrmv4" else GenerateConfig(out=out)
    return replace(config, users=users, items=items, artists=artists, albums=albums, history=model.max_history)
