"""The environment of a run apart from machine, source and configuration: packages, variables, and the launcher of its
ranks."""

import multiprocessing
import os
import sys
from importlib import metadata
from pathlib import Path

from dlrm_bench.bench.records.schema import Provenance, StartedBy

_READ_BY_LIBRARIES = (
    *("CUDA_", "CUBLAS", "CUDNN_", "NCCL_", "NVIDIA_", "GLOO_", "UCX_", "TORCH", "PYTORCH_", "TRITON_", "FBGEMM"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "TCMALLOC_", "LD_PRELOAD", "PYTHONHASHSEED"),
    *("PYTHONMALLOC", "PYTHON_GIL", "PYTHONOPTIMIZE", "SLURM_CPU", "SLURM_MPI"),
)
"""Prefixes of variables that affect the speed or the results of a run."""
_OF_IMAGES = ("NVIDIA_REQUIRE", "NVIDIA_PRODUCT_NAME", "NVIDIA_DRIVER_CAPABILITIES")
"""Prefixes of variables in which NVIDIA's container images describe themselves in kilobytes; no library of a run reads
these."""
_OF_LAUNCHERS = "TORCHELASTIC_"
_NVIDIA = "nvidia"
"""Folder of site-packages with cuBLAS, cuDNN, NCCL and others, libraries that torch loads without an import."""


def provenance() -> Provenance:
    """Returns the provenance of this process, after all of its imports."""
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_READ_BY_LIBRARIES) and not name.startswith((_OF_LAUNCHERS, *_OF_IMAGES))
    }
    return Provenance(packages=imported_packages(), environment=environment, started_by=started_by())


def imported_packages() -> dict[str, str]:
    """Returns the version of each installed distribution of which a module is imported, and of NVIDIA's libraries for
    torch."""
    modules = {name.partition(".")[0] for name in sys.modules}
    versions = {}
    for module, distributions in metadata.packages_distributions().items():
        if module in modules or module == _NVIDIA:
            versions.update({name: metadata.version(name) for name in distributions})
    return dict(sorted(versions.items(), key=lambda each: each[0].lower()))


def started_by() -> StartedBy:
    """Returns the launcher, by its variables in the environment, and the command line of the parent process."""
    launcher, above = "python", os.getppid()
    forked_by = multiprocessing.parent_process()
    if forked_by is not None and forked_by.pid is not None:
        launcher, above = "fork server", forked_by.pid
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = "torchrun"
    elif "SLURM_PROCID" in os.environ:
        launcher = "srun"
    return StartedBy(
        launcher=launcher, command=_command(above), local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    )


def _command(process: int) -> list[str]:
    try:
        words = Path("/proc", str(process), "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words]
