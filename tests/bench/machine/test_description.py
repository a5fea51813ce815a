"""The machine description: with a faked NVML, without one, and over ranks; names."""

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_bench.bench.machine import description as machine
from dlrm_bench.bench.machine.description import describe_machine, largest_gpu_bytes, platform_name, short_name
from dlrm_bench.bench.records.schema import Machine
from dlrm_bench.dlrm.runtime.ranks import Ranks

UUID = "11111111-2222-3333-4444-555555555555"


class NVMLError(Exception):
    pass


class FakeNvml:
    """pynvml on a host whose H200 is known by `handles`; what is in `refused` raises, as on an older driver."""

    NVML_SUCCESS = 0
    NVML_CLOCK_SM = 1
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def __init__(self, handles: dict[str, str], refused: tuple[str, ...] = (), links: int = 18) -> None:
        self.handles = handles
        self.refused = refused
        self.links = links
        self.sessions = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "refused"):
            raise NVMLError(name)
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:  # noqa: N802
        self.sessions += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.95.05"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return self.handles[uuid]

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:  # noqa: N802
        return self.handles[bus_id]

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return ("gpu", "small")[index]

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=10 * 10**9 if gpu == "small" else 141 * 10**9)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetClockInfo(self, gpu: str, clock: int) -> int:  # noqa: N802
        return 1755

    def nvmlDeviceGetMaxClockInfo(self, gpu: str, clock: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetNvLinkState(self, gpu: str, link: int) -> int:  # noqa: N802
        if link >= 18:
            raise NVMLError("no such link")
        return int(link < self.links)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: str, link: int) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetFieldValues(self, gpu: str, fields: list[int]) -> list[Any]:  # noqa: N802
        assert fields == [90]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562))]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: str) -> int:  # noqa: N802
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: str) -> int:  # noqa: N802
        return 16


def describe_with(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> dict[str, Any]:
    monkeypatch.setattr(machine, "pynvml", nvml)
    return machine._describe_gpu(UUID, "00000000:1b:00.0")


def named(**fields: Any) -> Machine:
    return describe_machine() | {"nodes": 1, "gpus": 8, "gpu": "NVIDIA H200"} | fields  # type: ignore[return-value]


def test_description_has_every_field_and_counts_this_process() -> None:
    description = describe_machine()
    assert list(description) == list(Machine.__annotations__)
    assert description["nodes"] == 1
    assert description["gpus"] == int(torch.cuda.is_available())
    assert description["torch"] == torch.__version__
    assert description["cores"] is not None
    assert len(description["rank_cpus"]) == 1
    assert len(description["boots"]) == 1


def test_nvml_is_read_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml({f"GPU-{UUID}": "gpu"})
    assert describe_with(monkeypatch, nvml) == {
        "driver": "580.95.05",
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1755,
        "sm_clock_max_mhz": 1980,
        "topology": "nvlink: 18 links a GPU, 26.6 GB/s each, to NVSwitch",
    }
    assert nvml.sessions == 0


def test_nvml_is_read_by_bus_id_where_the_uuid_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_with(monkeypatch, FakeNvml({"00000000:1b:00.0": "gpu"}))["power_limit_w"] == 700.0


def test_an_unknown_gpu_leaves_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_with(monkeypatch, FakeNvml({})) == {"driver": "580.95.05"}


def test_without_nvml_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_with(monkeypatch, None) == {}
    assert describe_with(monkeypatch, FakeNvml({f"GPU-{UUID}": "gpu"}, refused=("nvmlInit",))) == {}


def test_the_memory_of_the_largest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for nvml, found in (
        (FakeNvml({}), 141 * 10**9),
        (FakeNvml({}, refused=("nvmlDeviceGetMemoryInfo",)), None),
        (FakeNvml({}, refused=("nvmlInit",)), None),
        (None, None),
    ):
        monkeypatch.setattr(machine, "pynvml", nvml)
        assert largest_gpu_bytes() == found
        assert nvml is None or nvml.sessions == 0


NVML_READS = {
    "nvmlSystemGetDriverVersion": "driver",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_w",
    "nvmlDeviceGetClockInfo": "sm_clock_mhz",
    "nvmlDeviceGetMaxClockInfo": "sm_clock_max_mhz",
}


@pytest.mark.parametrize("function", NVML_READS)
def test_a_refused_value_is_none_and_the_others_stay(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    handles = {f"GPU-{UUID}": "gpu"}
    complete = describe_with(monkeypatch, FakeNvml(handles))
    assert describe_with(monkeypatch, FakeNvml(handles, refused=(function,))) == complete | {NVML_READS[function]: None}


@pytest.mark.parametrize(
    ("refused", "links", "topology"),
    [
        (("nvmlDeviceGetFieldValues", "nvmlDeviceGetNvLinkRemoteDeviceType"), 4, "nvlink: 4 links a GPU"),
        ((), 0, "pcie: generation 5, 16 lanes"),
        (("nvmlDeviceGetNvLinkState",), 18, "pcie: generation 5, 16 lanes"),
        (("nvmlDeviceGetMaxPcieLinkWidth",), 0, None),
    ],
)
def test_topology(monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...], links: int, topology: str | None) -> None:
    assert describe_with(monkeypatch, FakeNvml({f"GPU-{UUID}": "gpu"}, refused, links))["topology"] == topology


@pytest.mark.parametrize(
    ("fields", "short", "platform"),
    [
        ({}, "8xh200", "8 x NVIDIA H200"),
        ({"gpus": 1}, "1xh200", "1 x NVIDIA H200"),
        (
            {"nodes": 2, "gpus": 16, "gpu": "NVIDIA H100 80GB HBM3"},
            "2x8xh100",
            "2 x 8 x NVIDIA H100 80GB HBM3",
        ),
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, "8xa100", "8 x NVIDIA A100-SXM4-80GB"),
        ({"nodes": 2, "gpus": 3}, "3xh200", "3 x NVIDIA H200"),
        ({"gpu": "NVIDIA TITAN"}, "8xtitan", "8 x NVIDIA TITAN"),
        ({"gpu": None, "gpus": 0, "cpu": "AMD EPYC 9654"}, "cpu", "AMD EPYC 9654"),
        ({"gpu": None, "gpus": 0, "cpu": None}, "cpu", "CPU"),
    ],
)
def test_names(fields: dict[str, Any], short: str, platform: str) -> None:
    assert short_name(named(**fields)) == short
    assert platform_name(named(**fields)) == platform


def describe_on_rank(ranks: Ranks) -> tuple[int, list[str]]:
    socket.gethostname = lambda: f"node{1 - ranks.rank // 2}"
    description = describe_machine()
    return description["nodes"], description["hosts"]


def test_nodes_are_the_distinct_hosts_of_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(3, describe_on_rank) == [(2, ["node1", "node0"])] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_is_described() -> None:
    description = describe_machine()
    assert description["gpu"] == torch.cuda.get_device_name()
    assert description["nccl"] is not None
    if machine.pynvml is not None:
        assert description["driver"] is not None
        assert description["sm_clock_mhz"] is None or description["sm_clock_mhz"] > 0
