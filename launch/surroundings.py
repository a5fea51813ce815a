"""Settings of a rank before its slow imports."""

import logging
import os
import sys
import warnings

from dlrm_bench.bench.instruments.beginning import BEGINNING


def prepare() -> None:
    """Begins the watch over a rank's start, and sets the variables that libraries read when they are imported."""
    BEGINNING.watch()  # first: whatever comes may take its time for good
    # CUDA's default is eight hardware queues, in which kernels of many streams could wait for one another.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # torchrec and fbgemm warn at every start of things that their users cannot change; `python -W default` shows these.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        logging.basicConfig(level=logging.ERROR)
        logging.getLogger("torch.fx").setLevel(logging.ERROR)
        logging.getLogger("dlrm_bench").setLevel(logging.WARNING)  # such as that a switch does not apply
