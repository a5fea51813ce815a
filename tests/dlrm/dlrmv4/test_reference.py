"""The reference's modules under our harness: what is refused by name, and, with a checkout, that they compute what our
network does."""

import sys
import types
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TABLES, ModelConfig, tables
from dlrm_bench.dlrm.dlrmv4.reference import (
    ReferenceBatch,
    _compile_settings_together,
    _pack_rows,
    build_hstu,
    build_reference,
    open_checkout,
    reference_names,
)
from tests.data.dlrmv4.make_model_reference import whole_time_table
from tests.dlrm.dlrmv4.cases import (
    CHECKOUT,
    LENGTHS,
    STILL,
    WIDE,
    made_training,
    make_samples,
    needs_checkout,
    run,
    set_weights,
    small_model,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network": "theirs"}, "--model.network is 'theirs': choose one of own, reference"),
        ({"network": "reference"}, "--model.network reference needs --model.reference"),
        (
            {"network": "reference", "reference": Path("x"), "content": "items"},
            "--model.content items: the reference makes content of every token",
        ),
        (
            {"network": "reference-as-shipped", "reference": Path("x"), "last_layer": "candidates"},
            "--model.last-layer candidates: the reference computes all tokens",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(STILL, **changes)


def test_a_folder_without_the_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"--model.reference {tmp_path} has no generative_recommenders/modules"):
        open_checkout(tmp_path)


def test_a_second_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "generative_recommenders" / "modules" / "dlrm_hstu.py"
    module.parent.mkdir(parents=True)
    module.touch()
    other = type(sys)("generative_recommenders")
    other.__path__ = ["/elsewhere"]
    monkeypatch.setitem(sys.modules, "generative_recommenders", other)
    with pytest.raises(ValueError, match=r"is imported from \['/elsewhere'\] already"):
        open_checkout(tmp_path)


def test_what_its_code_fixes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--model\.head-hidden: the reference's code has 512"):
        build_hstu(replace(STILL, head_hidden=64), False, CPU)


def test_bf16_is_refused_without_a_gpu() -> None:
    model = replace(STILL, network="reference", reference=Path("x"))
    with pytest.raises(ValueError, match="computes in bf16 on GPUs alone"):
        build_reference(made_training(model=model, precision="bf16"), CPU)


def test_all_settings_of_a_kernel_are_compiled_before_one_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments of the call that is being tuned, once for each time that its settings are chosen."""
    compiled: list[dict[str, Any]] = []
    settings = [triton.Config({"BLOCK": block}, num_warps=2) for block in (16, 32, 64)]
    tuner = Autotuner.__new__(Autotuner)
    tuner.fn = types.SimpleNamespace(warmup=lambda **arguments: compiled.append(arguments))
    tuner.configs, tuner.perf_model = settings, None
    tuner.early_config_prune = lambda configs, *_, **__: configs[:2]
    module = types.ModuleType("generative_recommenders.made")
    module.kernel = module.same_kernel = tuner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):  # a second model's, too
        _compile_settings_together()
    tuner.nargs = {"x": 1}

    assert tuner.prune_configs({"grid": (1,), "warmup": False, "N": 2}) == settings[:2]

    assert [arguments["BLOCK"] for arguments in compiled] == [16, 32]
    for arguments in compiled:
        assert {"x": 1, "grid": (1,), "N": 2, "num_warps": 2}.items() <= arguments.items()
        assert "warmup" not in arguments


def test_each_dense_weight_has_a_name_of_theirs() -> None:
    ours = {name for name, _ in small_model(WIDE).model.dense.named_parameters()}
    names = reference_names(WIDE)
    assert set(names) == ours
    assert len(set(names.values())) == len(names)


def test_a_batch_names_every_event_of_every_history() -> None:
    samples = make_samples(STILL, LENGTHS, seed=1)
    batch = ReferenceBatch.of(samples)
    merged = batch.features.to_dict()
    for table in tables(STILL):
        assert set(table.features) <= set(merged)
    assert torch.equal(merged["album_id"].values(), samples.album.long())
    assert merged["item_id"].lengths().tolist() == list(LENGTHS)
    assert torch.equal(merged["action_weight"].values(), samples.action.long())
    for i, name in enumerate(CONTEXT_TABLES):
        assert torch.equal(merged[name].values(), samples.context[i].long())
    assert torch.equal(batch.candidates["item_action_weight"].values(), samples.labels.long())


def of_reference(config: ModelConfig) -> dict[str, Tensor]:
    """Returns logits, loss and gradients of the reference's modules, by our names."""
    model = build_reference(made_training(model=config, precision="fp32"), CPU, CPU)
    theirs = dict(model.model.dense.network.named_parameters())
    weights = {f"dense.{ours}": theirs[name] for ours, name in reference_names(config).items()}
    weights |= {name: weight for name, weight in model.model.named_parameters() if name.startswith("embeddings.")}
    set_weights(weights)
    with whole_time_table():
        loss, (_, logits, _) = model(ReferenceBatch.of(make_samples(config, LENGTHS, seed=1)))
        loss.backward()
        model.eval()
        with torch.no_grad():
            _, (evaluated, again, _) = model(ReferenceBatch.of(make_samples(config, LENGTHS, seed=1)))
    torch.testing.assert_close(again, logits)
    torch.testing.assert_close(evaluated, loss.detach())
    grads = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    assert len(grads) == len(weights)
    return {"logits": logits, "loss": loss.detach(), **grads}


@needs_checkout
def test_its_modules_compute_what_our_network_does() -> None:
    checkout = Path(str(CHECKOUT))
    theirs = of_reference(replace(STILL, network="reference", reference=checkout))
    ours = run(small_model(STILL), STILL, make_samples(STILL, LENGTHS, seed=1))
    assert set(theirs) == set(ours)
    for name, value in ours.items():
        largest = max(float(value.abs().max()), 1e-3)
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-5 * largest, msg=name)


def test_its_attention_gets_copies_of_views_and_gradients_arrive_in_views() -> None:
    seen = []

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        seen.extend((q, k, v))
        return (q + k + v) * scale

    def backward(dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        seen.extend((dq, dk, dv, q, k, v))
        for gradient, factor in ((dq, 2), (dk, 3), (dv, 4)):
            gradient.copy_(dout * factor)

    attention: Any = types.SimpleNamespace(triton_hstu_attention_fwd=forward, triton_hstu_attention_bwd=backward)
    for _ in range(2):
        _pack_rows(attention)
    of_product, of_gradient = torch.rand(5, 4, 8), torch.zeros(5, 4, 8)
    _, v, q, k = of_product.unbind(1)
    _, dv, dq, dk = of_gradient.unbind(1)
    out = attention.triton_hstu_attention_fwd(q=q, k=k, v=v, scale=0.5)
    assert torch.equal(out, (q + k + v) * 0.5)
    attention.triton_hstu_attention_bwd(dout=out, q=q, k=k, v=v, dq=dq, dk=dk, dv=dv)
    assert torch.equal(of_gradient, torch.stack([torch.zeros_like(out), 4 * out, 2 * out, 3 * out], 1))
    assert len(seen) == 9
    assert all(tensor.is_contiguous() for tensor in seen)


@needs_checkout
def test_attention_of_the_checkout_is_wrapped() -> None:
    of_reference(replace(STILL, network="reference", reference=Path(str(CHECKOUT))))
    attention = import_module("generative_recommenders.ops.triton.triton_hstu_preprocess_and_attention")
    assert {type(getattr(attention, f"triton_hstu_attention_{way}")) for way in ("fwd", "bwd")} == {partial}


@needs_checkout
def test_it_begins_with_our_weights() -> None:
    config = made_training(model=replace(STILL, network="reference", reference=Path(str(CHECKOUT))), precision="fp32")
    theirs = dict(build_reference(config, CPU).model.dense.network.named_parameters())
    from dlrm_bench.dlrm.dlrmv4.network import DenseNetwork

    ours = DenseNetwork(STILL)
    ours.init_weights(config.seed)
    names = reference_names(STILL)
    assert all(torch.equal(theirs[names[name]], weight) for name, weight in ours.named_parameters())
