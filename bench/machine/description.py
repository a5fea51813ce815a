"""The machine of a run: hardware through NVML and Linux, and versions of the software.

A fact that cannot be read is None, never a guess, and never stops a run.
"""

import contextlib
import os
import platform
import re
import socket
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dlrm_bench.bench.machine import cpu
from dlrm_bench.bench.records.schema import Machine

try:
    import pynvml
except ImportError:  # a host without nvidia-ml-py
    pynvml = None

T = TypeVar("T")


class GpuState(NamedTuple):
    """The state of a GPU at one moment; None if NVML does not report it."""

    sm_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    clocks_event_reasons: int | None
    """Bits of nvml.h's nvmlClocksEventReasons: why the clock is not at its largest."""
    energy_j: float | None = None
    """Energy since the driver was loaded; NVML counts it on Volta and later. None also where it was not asked for."""


class _Place(NamedTuple):
    """The place of one rank: host name and number of its node, boot, UUID, name and NUMA node of its GPU, if it has
    one, and its CPUs."""

    host: str
    node: int
    boot: str | None
    uuid: str | None
    gpu: str | None
    gpu_numa: int | None
    cpus: str | None


def describe_machine() -> Machine:
    """Returns the machine that this run's ranks share. Collective once the process group is initialised (gloo or NCCL).

    A rank's GPU is its current CUDA device; a process without a process group is a run of one rank.
    """
    cuda = torch.cuda.is_available()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if cuda else None
    uuid = str(gpu.uuid) if gpu else None
    numa = cpu.numa_node_of_pci(_pci_bus_id(gpu)) if gpu else None
    # Node of torchrun: one host may run several nodes.
    node = int(os.environ.get("RANK", 0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    own = _Place(socket.gethostname(), node, cpu.boot_id(), uuid, gpu.name if gpu else None, numa, cpu.allowed_cpus())
    places = _gather_places(own)
    names = sorted({place.gpu for place in places if place.gpu is not None})
    hosts = list(dict.fromkeys(place.host for place in places))
    nvml = _describe_gpu(uuid, _pci_bus_id(gpu)) if gpu else {}
    return Machine(
        nodes=len({(place.host, place.node) for place in places}),
        hosts=hosts,
        gpus=len({(place.host, place.uuid) for place in places if place.uuid is not None}),
        gpu=" + ".join(names) or None,
        gpu_memory_gb=round(gpu.total_memory / 1e9, 1) if gpu else None,
        gpu_uuids=list(dict.fromkeys(place.uuid for place in places if place.uuid is not None)),
        gpu_numa=[place.gpu_numa for place in places] if gpu else None,
        boots=list(dict.fromkeys(place.boot for place in places if place.boot is not None)),
        cpu=cpu.name(),
        cpu_governor=cpu.governor(),
        cpu_mhz=cpu.clocks_mhz(),
        cpu_max_mhz=cpu.largest_clock_mhz(),
        numa=cpu.numa_nodes(),
        rank_cpus=[place.cpus for place in places],
        kernel=platform.release(),
        cores=os.cpu_count(),
        memory_gb=readable(lambda: round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)),
        driver=nvml.get("driver"),
        cuda=torch.version.cuda,
        nccl=readable(lambda: ".".join(map(str, torch.cuda.nccl.version()))) if cuda else None,
        python=platform.python_version(),
        torch=str(torch.__version__),
        torchrec=_installed("torchrec"),
        fbgemm_gpu=_installed("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm_gpu-cpu"),
        power_limit_w=nvml.get("power_limit_w"),
        sm_clock_mhz=nvml.get("sm_clock_mhz"),
        sm_clock_max_mhz=nvml.get("sm_clock_max_mhz"),
        topology=nvml.get("topology"),
    )


def short_name(machine: Machine) -> str:
    """Returns the machine's part of run ids: '8xh200', '2x8xh100' (two nodes of eight), 'cpu'."""
    if machine["gpu"] is None:
        return "cpu"
    return f"{_count(machine, 'x')}x{_model(machine['gpu'])}"


def gpus_of_node() -> int:
    """Returns the number of GPUs that CUDA would find on this node; creates no CUDA context on them."""
    return torch.cuda.device_count()


def short_name_of_node(gpus: int) -> str:
    """Returns short_name of a run on `gpus` GPUs of this node; asks NVML, because CUDA would take memory on one of
    them."""
    with nvml_session() as works:
        name = readable(lambda: str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))) if works else None
    return "cpu" if name is None else f"{gpus}x{_model(name)}"


def largest_gpu_bytes() -> int | None:
    """Returns the memory of the largest GPU of this node, which CUDA may not be allowed to use; None if NVML does not
    report it. Asks NVML, because CUDA would take memory."""
    with nvml_session() as works:
        return readable(lambda: max(map(_gpu_bytes, range(pynvml.nvmlDeviceGetCount())))) if works else None


def _gpu_bytes(index: int) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).total)


def _model(gpu: str) -> str:
    """Returns the first word with a digit: 'h200' of 'NVIDIA H200', 'a100' of 'NVIDIA A100-SXM4-80GB'; else the last
    word."""
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return next((word for word in words if re.search(r"\d", word)), words[-1])


def platform_name(machine: Machine) -> str:
    """Returns the name for the MLPerf log: '8 x NVIDIA H200', '2 x 8 x NVIDIA H100 80GB HBM3', or the CPU's name."""
    if machine["gpu"] is None:
        return machine["cpu"] or "CPU"
    return f"{_count(machine, ' x ')} x {machine['gpu']}"


def _count(machine: Machine, times: str) -> str:
    nodes, gpus = machine["nodes"], machine["gpus"]
    return f"{nodes}{times}{gpus // nodes}" if nodes > 1 and gpus % nodes == 0 else str(gpus)


def _gather_places(place: _Place) -> list[_Place]:
    if not dist.is_initialized():
        return [place]
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place)
    return places


def _installed(*distributions: str) -> str | None:
    """Returns the version of the first of `distributions` that is installed; nothing is imported."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def readable(read: Callable[[], T]) -> T | None:
    """Returns the result of `read`, or None if it raises: drivers differ in the queries that they refuse, and no
    description may fail."""
    try:
        return read()
    except Exception:  # of any kind: drivers, torch and /proc have their own errors, and none may end a run
        return None


def _pci_bus_id(gpu: Any) -> str | None:
    return readable(lambda: f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


@contextlib.contextmanager
def nvml_session() -> Iterator[bool]:
    """Whether NVML works here; shuts it down again. Sessions may nest: NVML counts them."""
    if pynvml is None or readable(lambda: pynvml.nvmlInit() or True) is None:
        yield False
        return
    try:
        yield True
    finally:
        readable(lambda: pynvml.nvmlShutdown())


def current_gpu() -> Any:
    """Returns NVML's handle of this rank's current CUDA device, within an nvml_session; None if there is none."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return _find_gpu(str(gpu.uuid), _pci_bus_id(gpu))


def gpu_state(gpu: Any, energy: bool = True) -> GpuState:
    """Returns the state of the GPU of this handle, within an nvml_session. Takes 0.1 ms, and does not disturb the GPU.

    energy: also its energy counter, for which an H200's driver (580) computes for 3 to 13 ms; allocations of CUDA
    memory wait meanwhile.
    """
    return GpuState(
        sm_clock_mhz=readable(lambda: float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))),
        temperature_c=readable(lambda: float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))),
        power_w=readable(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        clocks_event_reasons=readable(lambda: int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))),
        energy_j=readable(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000) if energy else None,
    )


def gpu_uuid(gpu: Any) -> str | None:
    """Returns the UUID of the GPU of this handle, within an nvml_session; None if NVML does not report it."""
    return readable(lambda: str(pynvml.nvmlDeviceGetUUID(gpu)))


def _find_gpu(uuid: str | None, bus_id: str | None) -> Any:
    """Returns NVML's handle of one GPU, by UUID, else by PCI bus id; None if NVML knows neither.

    Never by index: NVML counts all GPUs of the node, CUDA those in CUDA_VISIBLE_DEVICES and in another order.
    """
    gpu = readable(lambda: pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    return gpu or readable(lambda: pynvml.nvmlDeviceGetHandleByPciBusId(bus_id))


def _describe_gpu(uuid: str | None, bus_id: str | None) -> dict[str, Any]:
    """Returns NVML's facts about one GPU."""
    with nvml_session() as works:
        if not works:
            return {}
        facts: dict[str, Any] = {"driver": readable(lambda: pynvml.nvmlSystemGetDriverVersion())}
        gpu = _find_gpu(uuid, bus_id)
        if gpu is None:
            return facts
        return facts | {
            "power_limit_w": readable(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
            "sm_clock_mhz": readable(lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
            "sm_clock_max_mhz": readable(lambda: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
            "topology": _describe_links(gpu),
        }


def _describe_links(gpu: Any) -> str | None:
    """Describes the NVLinks of one GPU, or its PCIe link if no NVLink is active."""
    active = [link for link in range(pynvml.NVML_NVLINK_MAX_LINKS) if _link_is_active(gpu, link)]
    if not active:
        generation = readable(lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu))
        width = readable(lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu))
        return f"pcie: generation {generation}, {width} lanes" if generation and width else None
    text = f"nvlink: {len(active)} links a GPU"
    speed = readable(lambda: _link_speed_gb_s(gpu))
    if speed:
        text += f", {speed:.1f} GB/s each"
    remote = readable(lambda: pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, active[0]))
    if remote == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        text += ", to NVSwitch"
    return text


def _link_is_active(gpu: Any, link: int) -> bool:
    return readable(lambda: pynvml.nvmlDeviceGetNvLinkState(gpu, link)) == pynvml.NVML_FEATURE_ENABLED


def _link_speed_gb_s(gpu: Any) -> float | None:
    """Returns the speed of an active NVLink in one direction, GB/s."""
    (field,) = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    return field.value.uiVal / 1000 if field.nvmlReturn == pynvml.NVML_SUCCESS else None
