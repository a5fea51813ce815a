"""Tables of a profiled run's results."""

from rich import box
from rich.table import Table

from dlrm_bench.bench.profile.kernel_names import OTHER, STAGES, short_kernel_name
from dlrm_bench.bench.records.schema import RunRecord, Span

KERNELS_SHOWN = 10

_SHOWN_MS = 0.001
"""Threads with less CPU time per iteration are left out of the table."""

_BAR = 40  # characters

COUNTS = ("kernel_launches", "graph_launches", "stream_syncs", "memcpy_calls", "d2h_copies")


def host_table(run: RunRecord) -> Table:
    """Returns a table of host and GPU in a profiled run. ValueError if the record is of a timed run."""
    host, gpu = run["host"], run["gpu"]
    stages, host_stages = run["stages_ms"], run.get("host_stages_ms")
    if host is None:
        raise ValueError(
            f"{run['id']} is a timed run, without a profile: `dlrm-bench host RECORD` profiles its configuration"
        )
    table = Table(title=f"{run['id']}: an iteration of one rank", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("", "host", "GPU"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_row("busy, ms", f"{host['cpu_ms']:.3f} CPU time", f"{gpu['busy_ms']:.3f}" if gpu else "")
    threads = {"launching thread": host.get("launching_thread_ms", 0.0), **(run.get("host_threads_ms") or {})}
    for name, ms in threads.items():
        if ms >= _SHOWN_MS:
            table.add_row(f"  {name}, ms", f"{ms:.3f}", "")
    if gpu and "computing_ms" in gpu:
        table.add_row("without collectives, ms", "", f"{gpu['computing_ms']:.3f}")
    table.add_row("of, ms", f"{host['wall_ms']:.3f}", _idle(gpu) if gpu else "")
    for name in COUNTS:
        table.add_row(name.replace("_", " "), f"{host[name]:g}" if name in host else "not counted", "")
    for stage in (*STAGES, OTHER):
        if stages is not None and host_stages is not None:
            on_gpu = f"{stages[stage]:.3f}" if gpu else ""
            table.add_row(f"{stage.replace('_', ' ')}, ms", f"{host_stages[stage]:.3f}", on_gpu)
    return table


def timeline_table(run: RunRecord) -> Table | None:
    """Returns a table of each stage's span; None if the record has none."""
    timeline = run.get("timeline")
    if not timeline:
        return None
    place = "GPU, from its first kernel" if run["gpu"] else "host"
    table = Table(title=f"an iteration in time, ms ({place})", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("stage", "from", "to", "busy", ""):
        table.add_column(column, justify="left" if column in ("stage", "") else "right", no_wrap=True)
    first, last = _extent(timeline)
    for stage, span in timeline.items():
        left, right = (round(_BAR * (span[end] - first) / max(last - first, 1e-9)) for end in ("start_ms", "end_ms"))
        times = (f"{span['start_ms']:.3f}", f"{span['end_ms']:.3f}", f"{span['busy_ms']:.3f}")
        table.add_row(stage.replace("_", " "), *times, " " * left + "█" * max(1, right - left))
    return table


def kernel_table(run: RunRecord) -> Table | None:
    """Returns a table of the longest kernels and copies of a profiled run on GPUs; None if the record has none."""
    kernels = run.get("kernels")
    if not kernels:
        return None
    shown, rest = kernels[:KERNELS_SHOWN], kernels[KERNELS_SHOWN:]
    table = Table(title="longest kernels of an iteration", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("kernel", "stage", "calls", "us", "of ranks: least", "most"):
        table.add_column(column, justify="left" if column in ("kernel", "stage") else "right", overflow="fold")
    for kernel in shown:
        times = (f"{kernel[us]:.1f}" for us in ("us", "least_us", "most_us"))
        table.add_row(
            short_kernel_name(kernel["name"]), kernel["stage"].replace("_", " "), f"{kernel['calls']:g}", *times
        )
    if rest:
        calls, us = (sum(kernel[field] for kernel in rest) for field in ("calls", "us"))
        table.add_row(f"{len(rest)} others", "", f"{calls:g}", f"{us:.1f}", "", "")
    return table


def _extent(timeline: dict[str, Span]) -> tuple[float, float]:
    return min(s["start_ms"] for s in timeline.values()), max(s["end_ms"] for s in timeline.values())


def _idle(gpu: dict[str, float]) -> str:
    """Returns the GPU idle time of the worst rank, and the mean over the ranks if the record has it."""
    mean = gpu.get("mean_idle_fraction")
    return f"{gpu['idle_fraction']:.0%} idle" + ("" if mean is None else f" (worst rank; mean {mean:.0%})")
