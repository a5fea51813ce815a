"""Prepares a rank's process before its slow imports."""

import logging
import os
import sys
import warnings

from dlrm_bench.bench.instruments.beginning import BEGINNING


def prepare() -> None:
    """Starts the watchdog over a rank's start-up, and sets the variables that libraries read when imported."""
    BEGINNING.watch()  # first, because anything that follows may hang
    # CUDA's default is eight hardware queues, in which kernels of many streams could wait for one another.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # torchrec and fbgemm always warn at start-up about things that users cannot change; see them by `python -W
    # default`.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        logging.basicConfig(level=logging.ERROR)
        logging.getLogger("torch.fx").setLevel(logging.ERROR)
        logging.getLogger("dlrm_bench").setLevel(logging.WARNING)  # for example, that a switch does not apply
