"""DLRMv4 computes what the reference's own code does: against its committed results, and against a checkout."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torchrec import JaggedTensor

from dlrm_bench.dlrm.config import Precision
from dlrm_bench.dlrm.dlrmv4.batch import Batch, batch_of
from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TOKENS, Kernels, LastLayer, ModelConfig, tables
from dlrm_bench.dlrm.dlrmv4.model import Dlrmv4Train
from dlrm_bench.dlrm.dlrmv4.network import DenseNetwork, Postprocessor, loss_of, time_features
from dlrm_bench.dlrm.dlrmv4.reference import open_checkout
from dlrm_bench.dlrm.dlrmv4.samples import Samples
from dlrm_bench.dlrm.dlrmv4.sequences import offsets_of
from dlrm_bench.kernels.dense._dropout import Dropout, draw_seed
from dlrm_bench.kernels.dense.gated_norm import gated_norm_factors
from dlrm_bench.kernels.dense.token_input import TokenPlaces, token_input_factors
from tests.data.dlrmv4.make_model_reference import (
    CASES,
    case_samples,
    initial_laws,
    law,
    load,
    pack,
)
from tests.data.dlrmv4.make_model_reference import run as run_reference
from tests.dlrm.dlrmv4.cases import (
    CHECKOUT,
    LENGTHS,
    SMALL,
    STILL,
    by_item,
    make_samples,
    needs_checkout,
    run,
    small_model,
)

LAWS = ModelConfig(event_rows=(1, 1, 1), context_rows=(1,) * 8, embedding_dim=64, width=64, heads=2, head_width=32)


@cache
def committed() -> dict[str, dict[str, np.ndarray]]:
    return load()


def ours(case: str) -> dict[str, Tensor]:
    config, options = CASES[case]
    precision = "bf16" if options.get("bf16") else "fp32"
    return run(small_model(config, precision), config, case_samples(), options.get("seed", 0))


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest element of each array."""
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        largest = max(float(np.abs(expected).max(initial=0)), 1e-3)
        np.testing.assert_allclose(ours[name], expected, rtol=0, atol=tolerance * largest, err_msg=name)


@pytest.mark.parametrize("case", ["still", "dropout", "widths"])
def test_logits_loss_and_gradients_are_the_references(case: str) -> None:
    theirs = committed()[case]
    assert_equal(pack(ours(case), whole=case == "still"), theirs)
    assert all(np.abs(value).max() > 0 for value in theirs.values())


def test_bf16_errs_no_more_than_the_reference_does() -> None:
    """Both against fp32: of logits, and of all gradients' sums together."""
    exact, theirs, mine = pack(ours("still"), False), committed()["bf16"], pack(ours("bf16"), False)
    for names in (["logits"], [name for name in exact if name.startswith(("dense", "embeddings")) and "/" not in name]):
        scale = [max(1e-3, float(np.abs(exact[name]).max())) for name in names]
        errors = [
            np.sqrt(np.mean([np.mean(((of(n) - exact[n]) / s) ** 2) for n, s in zip(names, scale, strict=True)]))
            for of in (mine.__getitem__, theirs.__getitem__)
        ]
        assert 0 < errors[0] <= 1.25 * errors[1] < 0.25, (names[0], errors)


def test_weights_start_by_the_references_laws() -> None:
    dense = DenseNetwork(LAWS)
    dense.init_weights(seed=5)
    theirs = committed()["init"]
    mine = {f"dense.{name}": weight for name, weight in dense.named_parameters()}
    assert set(mine) == set(theirs)
    for name, weight in mine.items():
        mean, deviation, most = law(weight.detach())
        spread = 4 * theirs[name][1] / weight.numel() ** 0.5  # four standard errors, of the mean and nearly of others
        assert abs(mean - theirs[name][0]) <= spread + 1e-7, name
        assert abs(deviation - theirs[name][1]) <= spread + 1e-7, name
        assert (most < 1.9) == (theirs[name][2] < 1.9), f"{name}: uniform or normal"


@needs_checkout
@pytest.mark.parametrize("case", list(CASES))
def test_the_checkouts_results_are_the_committed_ones_and_ours(case: str) -> None:
    open_checkout(Path(str(CHECKOUT)))
    config, options = CASES[case]
    theirs = run_reference(config, case_samples(), **options)
    packed = pack(theirs, whole=case == "still")
    tolerance = 1e-5 if case != "bf16" else 0.05  # products in bf16 differ between CPUs
    assert_equal(packed, committed()[case], tolerance)
    if case != "bf16":
        assert_equal(pack(ours(case), True), pack(theirs, True))


@needs_checkout
def test_the_checkouts_initial_laws_are_the_committed_ones() -> None:
    open_checkout(Path(str(CHECKOUT)))
    assert_equal(initial_laws(), committed()["init"], 1e-4)


def scores(model: Dlrmv4Train, samples: Samples, config: ModelConfig) -> Tensor:
    with torch.no_grad():
        return model(batch_of(samples, config))[1][1]


def only(samples: Samples, index: int) -> Samples:
    """Returns one of the samples, alone."""
    ends = samples.lengths.cumsum(0)
    events = slice(int(ends[index] - samples.lengths[index]), int(ends[index]))
    one = slice(index, index + 1)
    of_events = ("item", "artist", "album", "timestamp", "action")
    cut = {
        of.name: getattr(samples, of.name)[events if of.name in of_events else one]
        for of in fields(samples)
        if of.name != "context"
    }
    return Samples(context=samples.context[:, one], **cut)


def test_a_sample_scores_alone_as_among_others() -> None:
    config = replace(SMALL, attention_scale="maximum")
    model = small_model(config).eval()  # and evaluation drops nothing
    together = scores(model, case_samples(), config)
    assert together.std() > 0.1
    for index in range(len(together)):
        torch.testing.assert_close(scores(model, only(case_samples(), index), config), together[index : index + 1])


def test_attention_is_divided_by_the_ranks_longest_sequence_unless_told() -> None:
    """The switch changes what a sample scores among shorter ones, and nothing where the longest is a longest one."""
    longest, maximum = STILL, replace(STILL, attention_scale="maximum")
    assert int(case_samples().lengths.max()) == STILL.max_history
    model, fixed = small_model(longest), small_model(maximum)
    torch.testing.assert_close(
        scores(model, case_samples(), longest), scores(fixed, case_samples(), maximum), rtol=0, atol=0
    )
    alone = only(case_samples(), 4)
    assert (scores(model, alone, longest) - scores(fixed, alone, maximum)).abs().max() > 1e-3


@pytest.mark.parametrize("recompute", [False, True])
def test_a_last_layer_of_candidates_alone_gives_the_same(recompute: bool) -> None:
    some = replace(STILL, last_layer="candidates", recompute_layers=recompute)
    every, few = (run(small_model(of), of, case_samples()) for of in (STILL, some))
    assert_equal(pack(few, True), pack(every, True))


def test_a_last_layer_of_candidates_alone_errs_as_the_whole_one_in_bf16() -> None:
    exact = run(small_model(STILL), STILL, case_samples())["logits"]
    some = replace(STILL, last_layer="candidates")
    errors = [
        (run(small_model(of, "bf16"), of, case_samples())["logits"] - exact).square().mean().sqrt()
        for of in (STILL, some)
    ]
    assert 0 < errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("config", [STILL, SMALL], ids=["still", "dropout"])
def test_distinct_events_give_the_same(config: ModelConfig) -> None:
    samples = by_item(case_samples())
    once = run(small_model(config), config, samples, distinct=True)
    assert_equal(pack(once, True), pack(run(small_model(config), config, samples), True))


def test_distinct_events_err_no_more_in_bf16() -> None:
    samples = by_item(make_samples(replace(STILL, event_rows=(5, 17, 29)), LENGTHS, seed=2))  # each pair many times
    exact = run(small_model(STILL), STILL, samples)
    every, once = (run(small_model(STILL, "bf16"), STILL, samples, distinct=distinct) for distinct in (False, True))
    for name in ("logits", "dense.preprocessor.item_mlp.first.weight", "embeddings.embeddings.item_id.weight"):
        errors = [float((of[name] - exact[name]).norm()) for of in (every, once)]
        assert 0 < errors[1] < 1.5 * errors[0], (name, errors)


def test_layers_computed_again_give_equal_bits_with_the_same_dropout() -> None:
    again = replace(SMALL, recompute_layers=True)
    kept, computed = run(small_model(SMALL), SMALL, case_samples()), run(small_model(again), again, case_samples())
    assert all(torch.equal(kept[name], computed[name]) for name in kept)


PLAIN = replace(STILL, preprocessor_hidden=32)
FUSED = replace(PLAIN, kernels="fused")


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("last_layer", ["all", "candidates"])
def test_fused_kernels_give_the_same(last_layer: LastLayer, recompute: bool, distinct: bool) -> None:
    config = replace(FUSED, last_layer=last_layer, recompute_layers=recompute)
    samples = by_item(case_samples())
    plain = run(small_model(PLAIN), PLAIN, samples)
    assert_equal(pack(run(small_model(config), config, samples, distinct=distinct), True), pack(plain, True))


@pytest.mark.parametrize("lengths", [(0,), (1,), (40,), (0, 0), (1, 40, 0)])
def test_fused_kernels_give_the_same_of_odd_lengths(lengths: tuple[int, ...]) -> None:
    samples = make_samples(PLAIN, lengths, seed=3)
    config = replace(FUSED, last_layer="candidates")
    assert_equal(
        pack(run(small_model(config), config, samples), True), pack(run(small_model(PLAIN), PLAIN, samples), True)
    )


@pytest.mark.parametrize("last_layer", [pytest.param("all", marks=pytest.mark.gpu), "candidates"])
def test_fused_kernels_give_the_same_of_the_longest_history(last_layer: LastLayer) -> None:
    """Attention of all tokens takes seconds of a CPU."""
    device = torch.device("cuda" if last_layer == "all" else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = replace(PLAIN, max_history=4086, layers=1, heads=1, last_layer=last_layer)
    samples, results = make_samples(plain, (3, 4086), seed=3), []
    for config in (plain, replace(plain, kernels="fused")):
        model = small_model(config).to(device)
        loss, (_, logits, _) = model(batch_of(samples, config).to(device))
        loss.backward()
        grads = {name: weight.grad.cpu() for name, weight in model.model.named_parameters()}
        results.append(pack({"logits": logits.cpu(), "loss": loss.detach().cpu(), **grads}, True))
    assert_equal(results[1], results[0], 1e-5 if last_layer == "candidates" else 1e-4)


@pytest.mark.parametrize("last_layer", ["all", "candidates"])
def test_fused_kernels_drop_as_plain_ones_given_the_same_masks(
    last_layer: LastLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, samples = replace(SMALL, preprocessor_hidden=32, last_layer=last_layer), case_samples()
    config = replace(plain, kernels="fused")
    fused = run(small_model(config), config, samples, seed=4)
    torch.manual_seed(4)
    masks = masks_of(config, samples, draw_seed(torch.device("cpu")))
    monkeypatch.setattr(functional, "dropout", lambda x, rate, training: x * next(masks))
    assert_equal(pack(run(small_model(plain), plain, samples), True), pack(fused, True))
    assert next(masks, None) is None
    monkeypatch.undo()
    assert not torch.equal(run(small_model(config), config, samples, seed=5)["logits"], fused["logits"])


def masks_of(config: ModelConfig, samples: Samples, seed: Tensor) -> Iterator[Tensor]:
    """Yields factors in the order in which the plain network drops: of tokens, and of each layer's joined rows."""
    offsets, none = offsets_of(samples.lengths), torch.zeros(0, dtype=torch.int32)
    places = TokenPlaces(offsets, none, none, none, CONTEXT_TOKENS, config.max_length)
    tokens = int(offsets[-1])
    yield token_input_factors(Dropout(config.input_dropout, seed, 0), tokens, config.width, places)
    for number in range(1, config.layers + 1):
        last = number == config.layers and config.last_layer == "candidates"
        rows = len(samples.labels) if last else tokens
        yield gated_norm_factors(Dropout(config.layer_dropout, seed, number), torch.empty(rows, config.inner))


def test_fused_kernels_drop_nothing_in_evaluation() -> None:
    plain_config = replace(SMALL, preprocessor_hidden=32)
    config = replace(plain_config, kernels="fused")
    fused, plain = (scores(small_model(of).eval(), case_samples(), of) for of in (config, plain_config))
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["plain", "fused"])
@pytest.mark.parametrize("last_layer", ["all", "candidates"])
def test_padded_events_change_nothing(last_layer: LastLayer, kernels: Kernels) -> None:
    config = replace(PLAIN, last_layer=last_layer, kernels=kernels)
    model, batch = small_model(config), batch_of(by_item(case_samples()), config, distinct=True)
    padding = torch.tensor([3, 1, 2], dtype=torch.int32)
    assert batch.event is not None
    padded = replace(
        batch,
        event=torch.cat([batch.event, padding]),
        timestamp=torch.cat([batch.timestamp, padding]),
    )
    results = []
    for given in (batch, padded):
        model.zero_grad()
        loss, (_, logits, _) = model(given)
        loss.backward()
        grads = {name: weight.grad.clone() for name, weight in model.model.named_parameters()}
        results.append({"logits": logits, "loss": loss.detach(), **grads})
    assert_equal(pack(results[1], True), pack(results[0], True))


def test_fused_kernels_err_no_more_in_bf16() -> None:
    exact = run(small_model(PLAIN), PLAIN, case_samples())
    plain, fused = (run(small_model(of, "bf16"), of, case_samples()) for of in (PLAIN, FUSED))
    for name, value in exact.items():
        errors = [float((of[name] - value).norm()) for of in (plain, fused)]
        assert errors[1] <= 1.5 * errors[0] + 1e-3 * float(value.norm()), (name, errors)


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_no_samples_have_no_loss_and_gradients_of_zero(kernels: Kernels) -> None:
    """The network's own affair: TorchRec's tables refuse such a batch (test_batch.py)."""
    dense, samples = (
        small_model(replace(SMALL, preprocessor_hidden=32, kernels=kernels)).model.dense,
        make_samples(SMALL, (), seed=0),
    )
    rows = torch.empty(0, SMALL.embedding_dim, requires_grad=True)
    embedded = {name: JaggedTensor(rows, lengths=samples.lengths) for of in tables(SMALL) for name in of.features}
    batch = Batch(
        features=None,  # type: ignore[arg-type]
        longest=9,
        **{name: getattr(samples, name) for name in ("lengths", "timestamp", "action", "query_timestamp", "labels")},
    )
    loss = loss_of(dense(embedded, batch), samples.labels, SMALL)
    loss.backward()
    assert loss == 0
    assert not any(weight.grad.any() for weight in dense.parameters())


def test_samples_without_history_only() -> None:
    results = run(small_model(SMALL), SMALL, make_samples(SMALL, (0, 0), seed=0))
    assert results["logits"].isfinite().all()
    assert results["dense.preprocessor.candidate_action"].any()
    assert not results["dense.preprocessor.action_embedding"].any()


def test_time_features_go_round_in_a_day_and_a_week() -> None:
    seconds = torch.tensor([0, 6 * 3600, 3599, 86400 * 3 + 18 * 3600], dtype=torch.int32)
    hour, day = 2 * 3.14 * torch.tensor([0, 6, 0, 18]) / 24, 2 * 3.14 * torch.tensor([0, 0, 0, 3]) / 7
    expected = torch.stack([hour.cos(), hour.sin(), day.cos(), day.sin()], dim=1)
    torch.testing.assert_close(time_features(seconds), expected)


def test_time_features_are_looked_up_to_the_bit() -> None:
    """Beside the ends of hours, and where fp32 has no odd numbers."""
    ends = 3600 * torch.arange(7300)
    seconds = torch.cat([ends + beside for beside in (-1, 0, 1, 1801)]).clamp(min=0).int()
    assert torch.equal(Postprocessor(SMALL).time_features(seconds), time_features(seconds))


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["plain", "fused"])
@pytest.mark.parametrize("last_layer", ["all", "candidates"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_computes_as_the_host(precision: Precision, last_layer: LastLayer, kernels: Kernels) -> None:
    """In fp32 within 1e-4 of it, for products are summed in another order; in bf16 with no larger error than it has."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = replace(STILL, last_layer=last_layer, head_width=32, preprocessor_hidden=32, kernels=kernels)
    exact = run(small_model(config), config, case_samples())
    host = run(small_model(config, precision), config, case_samples())
    model = small_model(config, precision).cuda()
    loss, (_, logits, _) = model(batch_of(case_samples(), config).to(torch.device("cuda")))
    loss.backward()
    gpu = {"logits": logits, "loss": loss.detach()}
    gpu |= {name: weight.grad for name, weight in model.model.named_parameters()}
    for name, value in exact.items():
        scale = max(float(value.abs().max()), 1e-3)
        error = float((gpu[name].cpu() - value).norm()) / scale
        of_host = float((host[name] - value).norm()) / scale
        assert error <= (1e-4 if precision == "fp32" else 1.5 * of_host + 0.02), (name, error, of_host)


@pytest.mark.gpu
def test_fused_kernels_give_equal_bits_run_by_run() -> None:
    config = replace(SMALL, kernels="fused", preprocessor_hidden=32, last_layer="candidates")
    model = small_model(config, "bf16").cuda()
    batch = batch_of(by_item(case_samples()), config, distinct=True).to(torch.device("cuda"))
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        model.zero_grad()
        loss, (_, logits, _) = model(batch)
        loss.backward()
        grads = [weight.grad.clone() for weight in model.model.dense.parameters()]
        runs.append([loss.detach(), logits, *grads])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def test_loss_is_a_fifth_of_the_mean_cross_entropy() -> None:
    assert float(loss_of(torch.zeros(3), torch.tensor([0.0, 1.0, 1.0]), SMALL)) == pytest.approx(0.2 * math.log(2))
