"""Tables that do not fit are refused before they are built, on every rank, with the way out."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlrm_bench.dlrm.dcnv2.config import ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables import table_memory
from dlrm_bench.dlrm.tables.dynamic import id_map
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import DynamicRows
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces, bytes_of
from dlrm_bench.dlrm.tables.row_numbers import RawIds
from dlrm_bench.dlrm.tables.table_memory import HEADROOM, check_places_fit, check_tables_fit, device_memory_bytes
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.zoo.config import ZooOptimizer
from dlrm_bench.dlrm.zoo.hstu.config import SMALL
from dlrm_bench.kernels.embedding.id_map import Keys

CPU = torch.device("cpu")
ADAGRAD = OptimizerConfig().tables


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_tables_and_their_state_must_fit(one_rank):
    needed = int(2 * MLPERF_MODEL.tables.bytes / HEADROOM) + 1
    check_tables_fit(MLPERF_MODEL.tables, ADAGRAD, needed, CPU)
    with pytest.raises(ValueError, match=r"need 209\.1 GB, but the 1 rank\(s\) have 209\.1 GB"):
        check_tables_fit(MLPERF_MODEL.tables, ADAGRAD, needed - 1000, CPU)


@pytest.mark.parametrize(("embedding", "gigabytes"), [("rowwise_adagrad", "105.4"), ("sgd", "104.5")])
def test_other_optimizers_need_less(one_rank, embedding, gigabytes):
    optimizer = OptimizerConfig(embedding=embedding).tables
    check_tables_fit(MLPERF_MODEL.tables, optimizer, int(1.01 * float(gigabytes) * 1e9 / HEADROOM), CPU)
    with pytest.raises(ValueError, match=f"need {gigabytes} GB"):
        check_tables_fit(MLPERF_MODEL.tables, optimizer, int(0.99 * float(gigabytes) * 1e9 / HEADROOM), CPU)


@pytest.mark.parametrize("gigabytes", [0.5, 16, 80, 141, 200])
@pytest.mark.parametrize("scale", [1.0, 0.99])
def test_the_proposed_scale_fits(one_rank, gigabytes, scale):
    model = replace(MLPERF_MODEL, table_scale=scale)
    with pytest.raises(ValueError, match=r"--model\.table-scale") as raised:
        check_tables_fit(model.tables, ADAGRAD, int(gigabytes * 1e9), CPU)
    proposed = float(re.findall(r"--model\.table-scale (\S+)$", str(raised.value))[0])
    assert proposed > 0.85 * gigabytes / 209.1 * HEADROOM
    check_tables_fit(replace(MLPERF_MODEL, table_scale=proposed).tables, ADAGRAD, int(gigabytes * 1e9), CPU)


def ask(ranks: Ranks, model: ModelConfig, available: list[int]) -> str:
    try:
        check_tables_fit(model.tables, ADAGRAD, available[ranks.rank], ranks.device)
    except ValueError as error:
        return str(error)
    return "fits"


def two_questions(ranks: Ranks, model: ModelConfig) -> tuple[str, str]:
    enough, short = [int(2e9), int(210e9 / HEADROOM)], [int(209e9), 0]
    return ask(ranks, model, enough), ask(ranks, model, short)


def test_ranks_pool_their_memory_and_answer_alike(run_ranks):
    (fits, refused), other = run_ranks(2, two_questions, MLPERF_MODEL)
    assert (fits, refused) == other
    assert fits == "fits"
    assert "the 2 rank(s) have 198.6 GB" in refused


WHOLE = Tables(names=tuple("abcde"), rows=(10, 500_000, 10, 10, 400_000), columns=512, hot=(1,) * 5, whole=True)
"""Of five tables, two have all the bytes, with ROWWISE 1.03 and 0.82 GB; on four ranks, they are on ranks 1 and 0."""
ROWWISE = ZooOptimizer(embedding="rowwise_adagrad").tables


def ask_of_gpus(ranks: Ranks, tables: Tables, available: list[int], own: bool) -> str:
    """What check_tables_fit says. own: each rank has memory of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_memory, "own_memory", lambda device: own)
        try:
            check_tables_fit(tables, ROWWISE, available[ranks.rank], ranks.device)
        except ValueError as error:
            return str(error)
    return "fits"


def four_questions(ranks: Ranks) -> list[str]:
    enough, short = [int(2e9), int(2e9)], [int(1e9), int(5e9)]
    in_turn = replace(WHOLE, rows=WHOLE.rows[::-1])  # both large tables on rank 0 or on rank 1
    return [
        ask_of_gpus(ranks, WHOLE, enough, own=True),
        ask_of_gpus(ranks, WHOLE, short, own=True),
        ask_of_gpus(ranks, WHOLE, short, own=False),
        ask_of_gpus(ranks, replace(in_turn, whole=False), short, own=True),
    ]


def test_whole_tables_must_fit_on_their_own_rank(run_ranks):
    """The rank with the least memory counts, on every rank; host memory is shared."""
    answers, others = run_ranks(2, four_questions)
    assert answers == others
    fits, refused, shared, split = answers
    assert (fits, shared, split) == ("fits",) * 3
    assert "of 2 rank(s), rank 1 holds b, d, each of them whole, which need 1.0 GB" in refused
    assert "but a rank has 0.9 GB; shrink the tables with --model.table-scale 0.88" in refused


def test_more_ranks_are_advised_where_they_help():
    """hstu-small on GPUs of 24 GB, whose ranks hold 11.8 to 26.6 GB; its largest table alone has 25.9."""
    table_memory.refuse_tables(SMALL.tables, ROWWISE, 4 * int(24e9), 4)
    held = [sum(both) / 1e9 for both in table_memory.whole_table_bytes(SMALL.tables, ROWWISE, 4)]
    assert held == pytest.approx([11.9, 1.64, 26.6, 21.5], abs=0.1)
    with pytest.raises(ValueError, match=r"rank 2 .* need 26\.6 GB .* has 22\.8 GB; shrink the tables with") as raised:
        table_memory.refuse_whole_tables(SMALL.tables, ROWWISE, int(24e9), 4)
    scale = float(re.findall(r"--model\.table-scale (\S+)$", str(raised.value))[0])
    table_memory.refuse_whole_tables(replace(SMALL, table_scale=scale).tables, ROWWISE, int(24e9), 4)
    with pytest.raises(ValueError, match=r"rank 0 .* has 28\.5 GB; use more GPUs or shrink"):
        table_memory.refuse_whole_tables(SMALL.tables, ROWWISE, int(30e9), 2)


def share_of_the_host(local_world_size: int) -> int:
    return device_memory_bytes(Ranks(rank=0, local_rank=0, world_size=8, local_world_size=local_world_size, device=CPU))


def test_host_memory_is_shared_by_the_ranks_of_a_node_and_counts_the_page_cache(monkeypatch):
    meminfo = "MemTotal:       9000 kB\nMemFree:         100 kB\nMemAvailable:   8192 kB\nHugePages_Total:       0\n"
    monkeypatch.setattr(Path, "read_text", lambda path: meminfo if str(path) == "/proc/meminfo" else "")
    assert share_of_the_host(1) == 8 << 20
    assert share_of_the_host(4) == 2 << 20


def test_host_memory_is_that_of_the_container(monkeypatch):
    group = "/sys/fs/cgroup/memory"
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8192 kB\n",
        f"{group}.stat": "inactive_file 900\n",
        f"{group}.max": "4000\n",
        f"{group}.current": "3000\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: files.get(str(path), ""))
    assert share_of_the_host(2) == 950


def test_host_memory_of_this_machine():
    page = os.sysconf("SC_PAGE_SIZE")
    assert 0 < share_of_the_host(1) <= os.sysconf("SC_PHYS_PAGES") * page


WIDE = Tables(names=("a",), rows=(5000,), columns=512, hot=(1,))


def test_dynamic_rows_must_fit(one_rank):
    needed = int(bytes_of(1000, 512) / HEADROOM) + 1
    check_places_fit(WIDE, 1000, needed, CPU)
    with pytest.raises(
        ValueError, match=r"--dynamic-rows 1000 does not fit: rows, state and map need 0\.0 GB per rank"
    ):
        check_places_fit(WIDE, 1000, needed - 100, CPU)


def test_rows_of_an_evaluation_and_wide_states_must_fit_too(one_rank):
    assert bytes_of(1000, 512, 512, 30) - bytes_of(1000, 512) == 4 * (1000 * 511 + 30 * 1024)
    needed = int(bytes_of(1000, 512, 512, 30) / HEADROOM) + 1
    check_places_fit(WIDE, 1000, needed, CPU, 512, 30)
    with pytest.raises(ValueError, match="--dynamic-rows 1000 does not fit"):
        check_places_fit(WIDE, 1000, needed, CPU, 512, 31)


def needs_most_on_rank(ranks: Ranks, which: int) -> bool:
    """Whether the memory of a rank that needs more than others is too little for all."""
    unnamed = 1000 * (ranks.rank == which)
    with pytest.raises(ValueError, match="does not fit"):
        check_places_fit(WIDE, 1000, int(bytes_of(1000, 512, 1, 999) / HEADROOM), ranks.device, 1, unnamed)
    return True


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_needs_more_stops_all(run_ranks, which):
    assert run_ranks(2, needs_most_on_rank, which) == [True, True]


def test_dynamic_rows_take_the_bytes_that_are_said():
    tables = Tables(names=("a",), rows=(5000,), columns=64, hot=(1,), pooled=False)
    rank = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=CPU)
    rows = DynamicRows.in_parts(tables, rank, 0, RowPlaces(3000, True))
    held = sum(tensor.nbytes for tensor in (rows.weights, rows.state, rows.entries(), *rows.map.memory()))
    assert held == pytest.approx(bytes_of(3000, 64), abs=100)


class Sizes(TorchDispatchMode):
    """The bytes of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        returned = function(*arguments, **(named or {}))
        self.found += [tensor.nbytes for tensor in tree_leaves(returned) if isinstance(tensor, torch.Tensor)]
        return returned


def test_a_save_takes_no_more(monkeypatch):
    """Whatever the number of rows, of which some at a time are copied."""
    monkeypatch.setattr(id_map, "_CHUNK", 50)
    memory = torch.zeros(3001, 512), torch.zeros(3001, 512)
    rows = DynamicRows(RawIds((0,)), replace(WIDE, raw_ids=True), 0, RowPlaces(3000, True), memory)
    keys = Keys(torch.arange(2000), torch.zeros(2000, dtype=torch.int32))
    rows.place(keys, torch.empty(2000, dtype=torch.int32))
    with Sizes() as sizes:
        entries = rows.entries()
    assert entries.nbytes == 3000 * 4 * 4
    assert sorted(set(sizes.found) - {entries.nbytes})[-1] <= 50 * 4 * 4
    assert torch.equal(entries[:2000, 0].long(), keys.ids)


def test_so_do_rows_of_raw_ids():
    tables = replace(WIDE, raw_ids=True)
    memory = torch.zeros(3001, 512), torch.zeros(3001, 512)
    rows = DynamicRows(RawIds((0,)), tables, 0, RowPlaces(3000, True), memory)
    held = sum(tensor.nbytes for tensor in (rows.weights, rows.state, rows.entries(), *rows.map.memory()))
    assert held == pytest.approx(bytes_of(3000, 512, 512, raw_ids=True), abs=100)
