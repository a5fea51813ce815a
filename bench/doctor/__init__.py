"""The doctor: the time losses in an iteration of any training script, line by line.

host-doctor -- torchrun --nproc_per_node 8 train.py ...

The script stays unchanged. Its processes load hook.py at their start (see site_folder.py), a rank finds its iterations
and measures them (rank.py, sampler.py, marks.py), and the command makes findings of the ranks' files: of calls
(findings.py), of samples (host.py, periodic.py) and of ranks side by side (stragglers.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from . import hook, process_state

__version__ = "0.2.0"


@contextmanager
def iteration() -> Iterator[None]:
    """Marks an iteration for the doctor, where it cannot find iterations itself; does nothing without the doctor.

    An iteration lasts until the next one begins, so that time between them counts too.
    """
    hook.boundary(process_state.MARK)
    yield
