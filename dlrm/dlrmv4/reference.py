"""The reference's own modules in place of our dense network: a baseline, by the same harness on the same batches.

The modules are those of mlcommons/training, recommendation/generative_recommenders, in a checkout that the user names
(--model.reference), unchanged, but attention gets copies of views (`_pack_rows`). Their Triton kernels, recomputation,
copies of embeddings and reads of the device stay: DlrmHSTU.preprocess and main_forward run as they are. The code around
them is ours, and no slower than the reference's own loop: rows come from the pipeline's tables, split by rows as the
reference shards them, each requested once; histories are built on the device from packed events, where the reference
copies 216 MB from unpinned memory; TorchRec's pipeline overlaps work that the reference's plain loop does in sequence;
clipped Adam reads no norm. --schedule base is the TorchRec pipeline closest to the reference's loop.

The modules do not need gin-config, which configures the reference's scripts: if it is not installed, a decorator that
does nothing replaces it. The modules need FBGEMM and Triton.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dlrm_bench.dlrm.config import require
from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TABLES, Dlrmv4Training, ModelConfig
from dlrm_bench.dlrm.dlrmv4.data.dataset import WindowBatch
from dlrm_bench.dlrm.dlrmv4.data.limits import LISTEN_PLUS, POOLS
from dlrm_bench.dlrm.dlrmv4.data.packed import END, LENGTH, Packed, PackedLayout, expand
from dlrm_bench.dlrm.dlrmv4.model import ModelParts, embedding_configs
from dlrm_bench.dlrm.dlrmv4.network import DenseNetwork, loss_of
from dlrm_bench.dlrm.dlrmv4.samples import Samples

_PACKAGE = "generative_recommenders"
_TUNED = "TRITON_FULL_AUTOTUNE"
_FIXED = ModelConfig()
_FIXED_FIELDS = ("action_dim", "head_hidden", "position_buckets", "time_buckets", "loss_weight")
"""Numbers that the reference's modules have in their code."""
_MLP_PARTS = ("first", "swish", "second", "norm")
_LAYER_PARTS = {
    "norm_weight": "_input_norm_weight",
    "norm_bias": "_input_norm_bias",
    "uvqk_weight": "_uvqk_weight",
    "uvqk_bias": "_uvqk_beta",
    "output_norm_weight": "_output_norm_weight",
    "output_norm_bias": "_output_norm_bias",
    "output_weight": "_output_weight",
}


def open_checkout(checkout: Path, tuned: bool = False) -> None:
    """Makes the reference importable from the folder recommendation/ of a checkout.

    tuned: let its Triton kernels look for their fastest settings on this GPU; else they have those it ships, an
    MI350X's. ValueError names the folder without it, or that another copy is already imported.
    """
    if not (checkout / _PACKAGE / "modules" / "dlrm_hstu.py").is_file():
        raise ValueError(
            f"--model.reference {checkout} has no {_PACKAGE}/modules/dlrm_hstu.py: name the folder recommendation/ of "
            "a checkout of mlcommons/training, of 12 August 2026 or later"
        )
    known = sys.modules.get(_PACKAGE)
    if known is not None:
        others = [path for path in known.__path__ if Path(path).resolve() != (checkout / _PACKAGE).resolve()]
        require(not others, f"--model.reference {checkout}: {_PACKAGE} is imported from {others} already")
    os.environ[_TUNED] = "1" if tuned else "0"  # read when the kernels' modules are imported
    if importlib.util.find_spec("gin") is None and "gin" not in sys.modules:
        gin = types.ModuleType("gin")
        gin.__spec__ = importlib.util.spec_from_loader("gin", None)
        gin.configurable = lambda f=None, **_: f if callable(f) else lambda g: g  # type: ignore[attr-defined]
        sys.modules["gin"] = gin
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))


def build_hstu(model: ModelConfig, bf16: bool, device: torch.device) -> nn.Module:
    """Returns the reference's DlrmHSTU of a model's widths, on `device`, without tables; `open_checkout` comes first.

    Its Triton kernels compute on GPUs, its PyTorch operators elsewhere. ValueError names a package that it lacks, or a
    field that its code fixes to another value.
    """
    for name in _FIXED_FIELDS:
        flag, fixed = f"--model.{name.replace('_', '-')}", getattr(_FIXED, name)
        require(getattr(model, name) == fixed, f"{flag}: the reference's code has {fixed}, which no flag of it changes")
    try:
        common: Any = import_module("generative_recommenders.common")
        configs: Any = import_module("generative_recommenders.dlrm_v4.configs")
        hstu: Any = import_module("generative_recommenders.modules.dlrm_hstu")
        attention = import_module("generative_recommenders.ops.triton.triton_hstu_preprocess_and_attention")
    except ImportError as error:
        raise ValueError(f"--model.reference: its modules need {error.name}, which is not installed") from error
    _pack_rows(attention)
    theirs = configs.get_hstu_configs("yambda-5b")
    theirs.hstu_embedding_table_dim, theirs.hstu_transducer_embedding_dim = model.embedding_dim, model.width
    theirs.hstu_num_heads, theirs.hstu_attn_num_layers = model.heads, model.layers
    theirs.hstu_attn_linear_dim = theirs.hstu_attn_qk_dim = model.head_width
    theirs.hstu_preprocessor_hidden_dim = model.preprocessor_hidden
    theirs.hstu_input_dropout_ratio, theirs.hstu_linear_dropout_rate = model.input_dropout, model.layer_dropout
    if model.max_history == _FIXED.max_history:
        theirs.max_seq_len = 4096  # train/gin/yambda_5b.gin; kernels are tuned for it
    network: nn.Module = hstu.DlrmHSTU(theirs, {}, is_inference=False, is_dense=True, bf16_training=bf16)
    kernels: Any = common.HammerKernel
    set_kernel: Any = network.set_hammer_kernel
    set_kernel(kernels.TRITON if device.type == "cuda" else kernels.PYTORCH)
    return network.to(device)


def _pack_rows(attention: Any) -> None:
    """Makes a layer of the reference give its attention copies of q, k and v, and of their gradients.

    They are views of one product. On Hopper, attention copies tiles by TMA, whose descriptors take a view's rows for
    adjacent: results are wrong and gradients NaN (github.com/meta-recsys/generative-recommenders/issues/583). With TMA
    off, a setting that it tries on an H200 accesses memory outside of its tensors. The copies read and write 18 KB a
    token and layer.

    attention: the module triton_hstu_preprocess_and_attention; a second call has no effect.
    """
    forward, backward = attention.triton_hstu_attention_fwd, attention.triton_hstu_attention_bwd
    if isinstance(forward, partial):
        return
    attention.triton_hstu_attention_fwd = partial(_packed_forward, forward)
    attention.triton_hstu_attention_bwd = partial(_packed_backward, backward)


def _packed_forward(forward: Any, *, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    return forward(q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), **others)


def _packed_backward(backward: Any, *, dq: Tensor, dk: Tensor, dv: Tensor, **others: Any) -> None:
    others |= {name: others[name].contiguous() for name in ("q", "k", "v")}
    packed = [torch.empty_like(of, memory_format=torch.contiguous_format) for of in (dq, dk, dv)]
    backward(dq=packed[0], dk=packed[1], dv=packed[2], **others)
    for gradient, of in zip((dq, dk, dv), packed, strict=True):
        gradient.copy_(of)


def _compile_settings_together() -> None:
    """Lets Triton compile all settings of a kernel of the reference at once, on all cores, before it times them in
    turn: there are some 300, which take minutes one after the other."""
    triton: Any = import_module("triton")
    tuners: Any = import_module("triton.runtime.autotuner")

    def compile_first(tuner: Any) -> None:
        prune = tuner.prune_configs  # of `run`, which calls it once for each key, before the first timing

        def compiled(arguments: Mapping[str, Any]) -> list[Any]:
            configs: list[Any] = prune(arguments)
            fixed = tuner.nargs | {name: value for name, value in arguments.items() if name != "warmup"}
            pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
            with pool, triton.AsyncCompileMode(pool, ignore_errors=True):  # timing leaves out what does not compile
                for config in configs:
                    tuner.fn.warmup(**fixed, **config.all_kwargs())
            return configs

        tuner.prune_configs = compiled

    modules = [module for name, module in sys.modules.items() if name.startswith(_PACKAGE + ".")]
    for value in [value for module in modules for value in vars(module).values()]:
        if isinstance(value, tuners.Autotuner) and "prune_configs" not in vars(value):  # of no earlier model or import
            compile_first(value)


def reference_names(config: ModelConfig) -> dict[str, str]:
    """Returns the reference's name of each dense weight of DenseNetwork."""
    transducer, preprocessor = "_hstu_transducer.", "_hstu_transducer._input_preprocessor."
    names = {
        "preprocessor.action_embedding": preprocessor + "_action_encoder._action_embedding_table",
        "preprocessor.candidate_action": preprocessor + "_action_encoder._target_action_embedding_table",
        "preprocessor.context_weight": preprocessor + "_batched_contextual_linear_weights",
        "preprocessor.context_bias": preprocessor + "_batched_contextual_linear_bias",
        "position_weight": transducer + "_positional_encoder._position_embeddings_weight",
        "time_weight": transducer + "_positional_encoder._timestamp_embeddings_weight",
    }
    mlps = {
        "preprocessor.item_mlp": preprocessor + "_content_embedding_mlp",
        "preprocessor.artist_album_mlp": preprocessor + "_additional_embedding_mlp",
        "preprocessor.action_mlp": preprocessor + "_action_embedding_mlp",
        "item_mlp": "_item_embedding_mlp",
        "head": "_multitask_module._prediction_module",
    }
    modules = {f"{ours}.{part}": f"{theirs}.{i}" for ours, theirs in mlps.items() for i, part in enumerate(_MLP_PARTS)}
    del modules["head.norm"]
    modules["postprocessor.combine"] = transducer + "_output_postprocessor._time_feature_combiner"
    modules["postprocessor.norm"] = transducer + "_output_postprocessor._layer_norm"
    names |= {f"{ours}.{of}": f"{theirs}.{of}" for ours, theirs in modules.items() for of in ("weight", "bias")}
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}.", f"{transducer}_stu_module._stu_layers.{layer}."
        names |= {ours + a: theirs + b for a, b in _LAYER_PARTS.items()}
    return names


def features(samples: Samples) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Returns the history's and the candidate's KeyedJaggedTensor, int64, as the reference's _build_sample fills them,
    on the samples' device."""
    events, one = samples.lengths.long(), torch.ones_like(samples.lengths, dtype=torch.int64)
    history = {name: (samples.context[i].long(), one) for i, name in enumerate(CONTEXT_TABLES)}
    history |= {
        "item_id": (samples.item.long(), events),
        "artist_id": (samples.artist.long(), events),
        "album_id": (samples.album.long(), events),
        "action_weight": (samples.action.long(), events),
        "action_timestamp": (samples.timestamp.long(), events),
        "dummy_watch_time": (torch.zeros_like(samples.timestamp, dtype=torch.int64), events),
    }
    candidate = {
        "item_candidate_id": (samples.candidate_item.long(), one),
        "item_candidate_artist_id": (samples.candidate_artist.long(), one),
        "item_candidate_album_id": (samples.candidate_album.long(), one),
        "item_query_time": (samples.query_timestamp.long(), one),
        "item_action_weight": (samples.labels.long(), one),  # bit 1 is listen+
        "item_dummy_watchtime": (one, one),
    }

    def kjt(of: dict[str, tuple[Tensor, Tensor]]) -> KeyedJaggedTensor:
        values, lengths = zip(*of.values(), strict=True)
        return KeyedJaggedTensor(
            list(of),
            torch.cat(values),
            lengths=torch.cat(lengths),
            stride=len(one),
            length_per_key=[len(value) for value in values],  # as the reference's collate knows it, on the host
        )

    return kjt(history), kjt(candidate)


@dataclass(kw_only=True)
class ReferenceBatch(Pipelineable):
    """A batch as the reference's modules take it."""

    features: KeyedJaggedTensor
    """Features of both others, one after the other: the input of its EmbeddingCollection."""
    history: KeyedJaggedTensor
    candidates: KeyedJaggedTensor
    labels: Tensor
    """float32 [B]."""

    @classmethod
    def of(cls, samples: Samples) -> "ReferenceBatch":
        """Returns samples as a batch, on their device."""
        history, candidates = features(samples)
        merged = KeyedJaggedTensor(
            history.keys() + candidates.keys(),
            torch.cat([history.values(), candidates.values()]),
            lengths=torch.cat([history.lengths(), candidates.lengths()]),
            stride=len(samples.labels),
            length_per_key=history.length_per_key() + candidates.length_per_key(),
        )
        return cls(features=merged, history=history, candidates=candidates, labels=samples.labels)

    def to(self, device: torch.device, non_blocking: bool = False) -> "ReferenceBatch":
        """Returns the batch on `device`."""
        moved = {name: of.to(device=device, non_blocking=non_blocking) for name, of in vars(self).items()}
        return replace(self, **moved)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the batch's memory until `stream` has finished its present work."""
        for of in vars(self).values():
            of.record_stream(stream)


@dataclass(kw_only=True)
class PackedReferenceBatch(Pipelineable):
    """A batch as readers build it; `to` makes histories of it on the device."""

    packed: Packed
    artist: Tensor
    album: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> ReferenceBatch:
        """Returns the batch in the modules' form, on `device`, where the maps must be."""
        return ReferenceBatch.of(expand(self.packed.to(device), self.artist, self.album))

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: the memory is the host's."""


class _Dense(nn.Module):
    """DlrmHSTU, whose lookup returns rows that it is handed."""

    def __init__(self, network: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.network: Any = network
        self._config = config
        self._logits: list[Tensor] = []
        head: Any = network.get_submodule("_multitask_module._prediction_module")
        head.register_forward_hook(lambda _, __, logits: self._logits.append(logits))

    def forward(self, embedded: dict[str, JaggedTensor], batch: ReferenceBatch) -> tuple[Tensor, Tensor]:
        """Returns the loss and the logits, fp32 [B]."""
        self.network._embedding_collection = lambda _: embedded
        try:
            losses = self.network(batch.history, batch.candidates, batch.features)[2]
        finally:
            del self.network._embedding_collection
        logits = self._logits.pop().flatten().float()
        self._logits.clear()
        if not self.training:  # the reference has losses in training alone
            return loss_of(logits, batch.labels, self._config), logits
        (loss,) = losses.values()
        return loss, logits


class _Model(nn.Module):
    def __init__(self, embeddings: EmbeddingCollection, dense: _Dense) -> None:
        super().__init__()
        self.embeddings, self.dense = embeddings, dense

    def forward(self, batch: ReferenceBatch) -> tuple[Tensor, Tensor]:
        return self.dense(self.embeddings(batch.features), batch)


class ReferenceTrain(nn.Module):
    """Returns what TorchRec's train pipelines take: the loss, and (loss, logits, labels), detached."""

    def __init__(self, model: _Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ReferenceBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        loss, logits = self.model(batch)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def build_reference(
    config: Dlrmv4Training, device: torch.device, tables_device: torch.device | None = None
) -> ReferenceTrain:
    """Returns the reference's modules with our initial weights of the seed, so that losses begin alike.

    tables_device: as of build_model. ValueError for what the checkout or this machine lacks, by the flag's name.
    """
    model = config.model
    assert model.reference is not None, "the configuration asks for one"
    require(
        device.type == "cuda" or config.precision != "bf16",
        "--model.network reference computes in bf16 on GPUs alone: choose --precision fp32 here",
    )
    open_checkout(model.reference, tuned=model.network == "reference")
    network = build_hstu(model, config.precision == "bf16", device)
    if model.network == "reference" and device.type == "cuda":
        _compile_settings_together()
    ours = DenseNetwork(model, config.precision)
    ours.init_weights(config.seed)
    theirs, names = dict(network.named_parameters()), reference_names(model)
    missing = set(theirs) ^ set(names.values())
    require(not missing, f"--model.reference: weights differ from those of August 2026: {', '.join(sorted(missing))}")
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            theirs[names[name]].copy_(weight)
    embeddings = EmbeddingCollection(tables=embedding_configs(model), device=tables_device or torch.device("meta"))
    return ReferenceTrain(_Model(embeddings, _Dense(network, model)))


def reference_parts(config: Dlrmv4Training, device: torch.device, artist: Tensor, album: Tensor) -> ModelParts:
    """Returns the reference's parts of a TorchRecModel. artist, album: int32 by item, on the training's device."""

    def batch(host: WindowBatch) -> PackedReferenceBatch:
        return PackedReferenceBatch(packed=host.packed, artist=artist, album=album)

    zeros = partial(_long_histories, config.local_batch_size, config.model.max_history // 2, device.type == "cuda")
    return ModelParts(build_reference(config, device), batch, zeros)


def _long_histories(samples: int, events: int, pin: bool) -> WindowBatch:
    """Returns samples of user and item 0 whose histories are as long as usual: kernels may be tuned on them."""
    packed = Packed.empty(
        PackedLayout(samples, events), tokens=samples * events, candidates=samples * events, longest=events, pin=pin
    )
    packed.storage.zero_()
    packed.action.fill_(LISTEN_PLUS)
    packed.samples[1:POOLS] = events  # no like and no skip
    packed.samples[END] = packed.samples[LENGTH] = events
    return WindowBatch(packed, samples)
