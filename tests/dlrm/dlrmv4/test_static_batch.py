"""Batches in fixed shapes: what the network makes of them is what it makes of the same batches as they are."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.config import Precision
from dlrm_bench.dlrm.dlrmv4.batch import batch_of_packed
from dlrm_bench.dlrm.dlrmv4.config import OWN_TOKENS, ModelConfig, tables
from dlrm_bench.dlrm.dlrmv4.data.builder import BatchBuilder
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits, Rows
from dlrm_bench.dlrm.dlrmv4.data.packed import Packed, by_items, events_of
from dlrm_bench.dlrm.dlrmv4.embedded import Embedded
from dlrm_bench.dlrm.dlrmv4.model import Dlrmv4Train
from dlrm_bench.dlrm.dlrmv4.network import loss_of
from dlrm_bench.dlrm.dlrmv4.static_batch import (
    NO_ROW,
    IdShape,
    dense_batch,
    on_device,
    padded,
    with_no_item,
    write_ids,
)
from tests.dlrm.dlrmv4.cases import STILL, small_model
from tests.dlrm.dlrmv4.data.made import ITEMS, random_cache, random_maps

LIMITS = Limits(history=12, min_history=0, scan=400)
MODEL = replace(
    STILL,
    event_rows=(ITEMS, 90, 90),
    context_rows=(300, 13, 12, 19, 23, 7, 5, 16),
    max_history=12,
    preprocessor_hidden=32,
)
MAPS = tuple(with_no_item(torch.from_numpy(of)) for of in (random_maps().artist, random_maps().album))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> list[Packed]:
    """Batches of neighbouring anchors; of users with no history, with one event, and of a single sample."""
    cache = random_cache(tmp_path_factory.mktemp("days"), LIMITS, users=30, events=250)
    builder = BatchBuilder(cache, random_maps(), Rows(*MODEL.rows))
    count = len(cache.positions)
    batches = [np.arange(first, min(first + 9, count)) for first in range(0, count, max(1, count // 10))]
    batches.append(np.unique(cache.uid[cache.positions], return_index=True)[1])  # the first anchor of each user
    return [builder.build(numbers) for numbers in (*batches, np.array([0]))]


def named(packed: Packed, content: str) -> Packed:
    """Returns the batch as readers hand it on."""
    return by_items(packed, pin=False) if content == "items" else packed


def shape_of(packed: Packed, spare: int) -> IdShape:
    """Returns the shape of a batch with spare room for events, and for half as many items."""
    layout = packed.layout
    items = None if layout.items is None else layout.items + spare // 2
    return IdShape(layout.samples, layout.events + spare, items)


def test_there_are_odd_lengths(packed: list[Packed]) -> None:
    lengths = torch.cat([of.samples[4] for of in packed])
    assert {0, 1, 12} <= set(lengths.tolist())


@pytest.mark.parametrize("content", ["events", "items"])
@pytest.mark.parametrize("spare", [0, 3, 50])
def test_ids_and_events_are_those_of_the_batch(packed: list[Packed], spare: int, content: str) -> None:
    for each in packed:
        of = named(each, content)
        size, count, shape = of.layout.samples, of.layout.named, shape_of(of, spare)
        fixed = padded(of, shape.layout, pin=False)
        ids = torch.empty(shape.size, dtype=torch.int32)
        write_ids(fixed, *MAPS, ids)
        batch = batch_of_packed(of, *MAPS, MODEL)
        values = batch.features.values()
        of_tables = ids.split(shape.of_tables)
        start = 0
        for number, (table, room) in enumerate(zip(tables(MODEL), of_tables, strict=True)):
            own = torch.cat([room[:count], room[shape.layout.named :]]) if number < 3 else room
            assert torch.equal(own, values[start : start + len(own)]), table.name
            assert set(room.tolist()) - set(own.tolist()) <= {NO_ROW}
            start += len(own)
        dense = dense_batch(fixed, of.tokens + spare + OWN_TOKENS * size, MODEL)
        assert dense.event is not None
        assert dense.event[: of.tokens].tolist() == events_of(of).tolist()
        assert len(dense.event) == of.tokens + spare
        back = padded(fixed, of.layout, pin=False)
        for name in ("samples", "item", "timestamp", "action", *(["place"] if content == "items" else [])):
            assert torch.equal(getattr(back, name), getattr(of, name)), name


@pytest.mark.parametrize("items", [None, 5])
def test_memory_that_no_batch_has_come_to_names_no_row(items: int | None) -> None:
    """Input dist reads it where the second batch has to wait: rows that are made when first named stay unmade."""
    shape = IdShape(4, 10, items)
    ids = torch.zeros(shape.size, dtype=torch.int32)
    write_ids(on_device(shape, torch.device("cpu")), *MAPS, ids)
    assert set(ids.tolist()) == {NO_ROW}


def rows_named(model: Dlrmv4Train, config: ModelConfig, ids: Tensor, shape: IdShape) -> Tensor:
    """Returns the rows of all ids, zeros in places of padding, as a leaf."""
    of_tables = []
    for table, own in zip(tables(config), ids.split(shape.of_tables), strict=True):
        looked_up = model.model.embeddings.embeddings[table.name].weight[own.clamp(min=0).long()]
        of_tables.append(looked_up * (own >= 0)[:, None])
    return torch.cat(of_tables).detach().requires_grad_()


def gradients(
    model: Dlrmv4Train, config: ModelConfig, rows: Tensor, shape: IdShape, fixed: Packed, room: int
) -> Tensor:
    """Returns loss, logits and gradients of a batch in a fixed shape, flat; those by rows of tables last."""
    dense = dense_batch(fixed, room, config)
    network = model.model.dense
    logits = network.scores(Embedded.in_order(rows, shape.samples, network.dtype), dense)
    loss = loss_of(logits, dense.labels, config)
    weights = list(model.model.dense.parameters())
    of_weights = torch.autograd.grad(loss, [*weights, rows])
    return torch.cat([loss.view(1), logits, *(g.flatten() for g in of_weights)]).detach()


@pytest.mark.parametrize(
    ("spare", "scale", "last_layer", "kernels", "content"),
    [
        *product((0, 37), ("longest", "maximum"), ("all", "candidates"), ("plain", "fused"), ("events",)),
        *product((0, 37), ("longest",), ("candidates",), ("plain", "fused"), ("items",)),
    ],
)
def test_padding_changes_nothing(
    packed: list[Packed], spare: int, scale: str, last_layer: str, kernels: str, content: str
) -> None:
    """Of all weights and of every row, fp32, by distinct items too; tokens of padding hold whatever the memory did."""
    config = replace(MODEL, attention_scale=scale, last_layer=last_layer)  # type: ignore[arg-type]
    model, ours = small_model(config), replace(config, kernels=kernels)  # type: ignore[arg-type]
    static = small_model(ours)
    for each in packed:
        of = named(each, content)
        shape = shape_of(of, spare)
        fixed = padded(of, shape.layout, pin=False)
        ids = torch.empty(shape.size, dtype=torch.int32)
        write_ids(fixed, *MAPS, ids)
        embeddings = model.model.embeddings.embeddings
        rows = rows_named(model, config, ids, shape)
        found = gradients(static, ours, rows, shape, fixed, of.tokens + spare + OWN_TOKENS * shape.samples)
        model.zero_grad()
        loss, (_, logits, _) = model(batch_of_packed(each, *MAPS, config))
        loss.backward()
        of_weights = [weight.grad.flatten() for weight in model.model.dense.parameters() if weight.grad is not None]
        expected = torch.cat([loss.view(1), logits, *of_weights]).detach()
        torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-5, atol=1e-6)
        of_rows = found[len(expected) :].view_as(rows)
        assert not of_rows[ids < 0].any()
        for table, own, of_own in zip(
            tables(config), ids.split(shape.of_tables), of_rows.split(shape.of_tables), strict=True
        ):
            grad = embeddings[table.name].weight.grad
            assert grad is not None
            summed = torch.zeros_like(grad).index_add_(0, own.clamp(min=0).long(), of_own)
            torch.testing.assert_close(summed, grad, rtol=1e-5, atol=1e-6)


def of_weights(of: Packed, config: ModelConfig, precision: Precision, device: str = "cpu") -> Tensor:
    """Returns loss, logits and gradients of the weights, flat, of a batch with spare room."""
    model, shape = small_model(config, precision).to(device), shape_of(of, 10)
    fixed = padded(of, shape.layout, pin=False).to(torch.device(device))
    ids = torch.empty(shape.size, dtype=torch.int32, device=device)
    write_ids(fixed, *(each.to(device) for each in MAPS), ids)
    rows = rows_named(model, config, ids, shape)
    room = of.tokens + 10 + OWN_TOKENS * shape.samples
    return gradients(model, config, rows, shape, fixed, room)[: -rows.numel()].cpu()


FUSED = replace(MODEL, kernels="fused", last_layer="candidates")


def test_distinct_items_err_no_more_in_bf16(packed: list[Packed]) -> None:
    for each in packed[:3]:
        exact = of_weights(each, FUSED, "fp32")
        errors = [float((of_weights(named(each, of), FUSED, "bf16") - exact).norm()) for of in ("events", "items")]
        assert errors[1] <= 1.3 * errors[0], errors


@pytest.mark.gpu
def test_distinct_items_on_a_gpu_are_the_hosts_and_equal_run_by_run(packed: list[Packed]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = replace(FUSED, head_width=32)
    for each in packed[:3]:
        of = named(each, "items")
        expected = of_weights(of, config, "fp32")
        torch.testing.assert_close(of_weights(of, config, "fp32", "cuda"), expected, rtol=1e-4, atol=1e-5)
        one, other = (of_weights(of, config, "bf16", "cuda") for _ in range(2))
        assert torch.equal(one, other)
