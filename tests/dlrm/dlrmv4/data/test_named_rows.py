"""Rows that a training names: counted like those of its batches, and extrapolated."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.data.named_rows import NamedRows, NamedRowsConfig, count_rows, extrapolated, main
from dlrm_bench.dlrm.dlrmv4.data.packed import CANDIDATE, CONTEXT_ROWS, LABEL
from dlrm_bench.dlrm.dlrmv4.parts import open_data
from dlrm_bench.dlrm.dlrmv4.presets import training

SMOKE = training("smoke-dlrmv4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    generate(smoke_config(out))
    return out


def test_counts_what_batches_name(root: Path) -> None:
    """In one batch that has all samples but those of the last window."""
    from dataclasses import replace

    config = replace(SMOKE, data=replace(SMOKE.data, path=root))
    data = open_data(config)
    windows = len(data._index) - 1
    found = count_rows(NamedRowsConfig(directory=root, windows=windows), SMOKE.model)
    assert found[-1].samples == data.train_samples
    assert 0 < found[0].samples < found[1].samples < found[2].samples
    builder = data._builder(pin=False)
    numbers = np.concatenate([data._index.select(w, np.arange(data._index.anchors_of(w))) for w in range(windows)])
    packed = builder.build(np.sort(numbers))
    context = packed.samples[CONTEXT_ROWS:LABEL]
    assert found[-1].rows[3:] == tuple(len(of.unique()) for of in context)
    items = len(np.unique(np.concatenate([packed.item.numpy(), packed.samples[CANDIDATE].numpy()])))
    assert 0 <= items - found[-1].rows[0] < 0.02 * items  # some events are in no history's pool


def test_the_window_that_evaluates_is_none_of_the_trainings(root: Path) -> None:
    with pytest.raises(ValueError, match=r"--windows is 20, and .* has only 19 windows to train on: add --windows 19"):
        count_rows(NamedRowsConfig(directory=root, windows=20), SMOKE.model)


def test_extrapolates_keys_and_not_rows() -> None:
    model = training("mlperf-dlrmv4").model
    half, whole = ((100,) * 11, (150, *(200,) * 10))
    at = extrapolated(NamedRows(1000, half), NamedRows(2000, whole), 8000, model)
    assert at.samples == 8000
    assert at.rows[0] == round(150 * 1.5**2)
    assert at.rows[1] == 800
    full = extrapolated(NamedRows(1, half), NamedRows(2, whole), 1e9, model)
    assert full.rows[0] <= model.rows[0]
    assert full.rows[4] == pytest.approx(1e8 * -math.expm1(-1e11 / 1e8))


def test_too_few_users_are_refused() -> None:
    model, few, many = training("mlperf-dlrmv4").model, (3,) * 11, (5,) * 11
    for half in (NamedRows(0, few), NamedRows(40, few)):
        with pytest.raises(ValueError, match=f"{half.samples} of 40 samples: too few users"):
            extrapolated(half, NamedRows(40, many), 1e6, model)


def test_prints_a_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root), "--windows", "5", "--samples", "1e6", "--world-size", "2"], SMOKE.model) == 0
    text = capsys.readouterr().out
    assert "1,000,000 *" in text
    assert "GB on each of 2" in text
    assert len(text.splitlines()) == 1 + 12 + 2
    assert main([str(root), "--windows", "500"], SMOKE.model) != 0
    assert re.search(
        r"--windows is 500, and .* has only 19 windows to train on: add --windows 19\n", capsys.readouterr().err
    )
