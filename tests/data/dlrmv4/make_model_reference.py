"""Runs the reference's own DLRMv4 on small cases and writes what it computes to model_reference.npz beside this file.

    PYTHONPATH=. python tests/data/dlrmv4/make_model_reference.py CHECKOUT

CHECKOUT is the folder recommendation/ of mlcommons/training (Apache-2.0), as of pull request #889 or later. Its PyTorch
operators run on the CPU. Two things of it are changed while they run, and nothing else:
- gin-config is replaced by a decorator that does nothing (dlrm/dlrmv4/reference.py).
- pytorch_add_timestamp_positional_embeddings cuts time buckets at the number of columns of their table (size(1)) where
  the Triton kernel that is trained with cuts at the number of rows. It is given zero columns up to that number.
  `kernel_buckets` runs that kernel, interpreted.
"""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig

from dlrm_bench.dlrm.dlrmv4.config import ModelConfig, tables
from dlrm_bench.dlrm.dlrmv4.reference import build_hstu, features, open_checkout
from dlrm_bench.dlrm.dlrmv4.samples import Samples
from tests.dlrm.dlrmv4.cases import LENGTHS, SMALL, STILL, WIDE, make_samples, reference_names, set_weights

FILE = Path(__file__).with_name("model_reference.npz")


def build(config: ModelConfig, bf16: bool) -> nn.Module:
    """Returns the reference's model of `config`'s widths, on the CPU, its tables included."""
    model = build_hstu(config, bf16, torch.device("cpu"))
    model._embedding_collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=of.name, num_embeddings=of.rows, embedding_dim=of.columns, feature_names=list(of.features)
            )
            for of in tables(config)
        ],
        device=torch.device("cpu"),
    )
    return model


@contextmanager
def whole_time_table() -> Any:
    from generative_recommenders.ops import position

    theirs = position.pytorch_add_timestamp_positional_embeddings

    def wide(seq_embeddings: Tensor, pos_embeddings: Tensor, ts_embeddings: Tensor, **others: Any) -> Tensor:
        columns = seq_embeddings.shape[1]
        more = ts_embeddings.shape[0] - columns
        padded = [nn.functional.pad(of, (0, more)) for of in (seq_embeddings, pos_embeddings, ts_embeddings)]
        names = ("seq_embeddings", "pos_embeddings", "ts_embeddings")
        return theirs(**dict(zip(names, padded, strict=True)), **others)[:, :columns]

    position.pytorch_add_timestamp_positional_embeddings = wide
    try:
        yield
    finally:
        position.pytorch_add_timestamp_positional_embeddings = theirs


@contextmanager
def _autocast_on_cpu() -> Any:
    """What the reference asks of autocast for "cuda", for the CPU."""
    theirs: Callable[..., Any] = torch.autocast
    torch.autocast = lambda _, **others: theirs("cpu", **others)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.autocast = theirs  # type: ignore[misc, assignment]


def run(config: ModelConfig, samples: Samples, bf16: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Returns logits, loss and the gradient of each weight, by our names, after one backward pass in training mode."""
    model = build(config, bf16)
    names = reference_names(config)
    theirs = dict(model.named_parameters())
    assert set(theirs) == set(names.values()), set(theirs) ^ set(names.values())
    weights = {ours: theirs[name] for ours, name in names.items()}
    set_weights(weights)
    logits: list[Tensor] = []
    model._multitask_module._prediction_module.register_forward_hook(lambda _, __, out: logits.append(out.squeeze(1)))
    torch.manual_seed(seed)
    with whole_time_table(), _autocast_on_cpu():
        losses = model(*features(samples))[2]
        loss = sum(losses.values())
        loss.backward()
    grads = {name: weight.grad for name, weight in weights.items()}
    return {"logits": logits[0].detach(), "loss": loss.detach(), **grads}


def kernel_buckets(times: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the time and position buckets that the reference's Triton kernel stores, int32 [N] each; interpreted.

    times: seconds of all tokens, [N]; lengths: tokens of each sequence, [B].
    """
    from generative_recommenders.ops.triton import triton_position
    from triton.runtime import interpreter

    theirs = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        theirs(tensor, scope)  # makes an int of an array of one number, which numpy no longer does
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    tokens, size, columns = len(times), len(lengths), 16
    found = [torch.full((tokens,), -1, dtype=torch.int32) for _ in range(2)]
    # `a and b` of masks is b where the kernel is interpreted: a program writes a whole block of rows past the end.
    values = [torch.zeros(rows, columns) for rows in (tokens + 16, 8192, 2049, tokens + 16)]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).long()
    strides = dict.fromkeys(("stride_sn", "stride_pn", "stride_tn", "stride_on"), columns)
    interpreter._patch_lang_tensor = patched
    try:
        triton_position._add_timestamp_position_embeddings_kernel.fn[(size, -(-int(lengths.max()) // 16))](
            **dict(zip(("SeqEmb", "PosEmb", "TsEmb", "Out"), values, strict=True)),
            **strides,
            Offsets=offsets,
            Lengths=lengths.long(),
            TS=times.long(),
            TsInds=found[0],
            PosInds=found[1],
            NumTargets=torch.ones(size, dtype=torch.int64),
            AUTOTUNE_MAX_SEQ_LEN=64,
            D=columns,
            num_time_buckets=2048,
            time_bucket_increments=60.0,
            time_bucket_scale=1.0,
            time_delta=0,
            max_contextual_seq_len=8,
            max_pos_ind=8192,
            TRAINING=True,
            HAS_MULTIPLE_TARGETS=True,
            INTERLEAVE_TARGETS=False,
            TIME_BUCKET_FN="sqrt",
            BLOCK_D=columns,
            BLOCK_N=16,
        )
    finally:
        interpreter._patch_lang_tensor = theirs
    return found[0], found[1]


CASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "still": (STILL, {}),
    "dropout": (SMALL, {"seed": 3}),
    "bf16": (STILL, {"bf16": True}),
    "widths": (WIDE, {"seed": 4}),
}


def case_samples() -> Samples:
    """Returns the samples of all cases."""
    return make_samples(SMALL, LENGTHS, seed=1)


def initial_laws(width: int = 64) -> dict[str, np.ndarray]:
    """Returns of each dense weight's initial values the mean, the standard deviation and the largest magnitude over
    it (1.73 of a uniform law, more than 2.5 of a normal one)."""
    wide = ModelConfig(
        event_rows=(1, 1, 1), context_rows=(1,) * 8, embedding_dim=width, width=width, heads=2, head_width=32
    )
    torch.manual_seed(0)
    theirs = dict(build(wide, False).named_parameters())
    names = reference_names(wide)
    return {name: law(theirs[names[name]].detach()) for name in names if name.startswith("dense.")}


def law(weight: Tensor) -> np.ndarray:
    """Returns mean, standard deviation and largest magnitude over it (0 of a constant), float32 [3]."""
    deviation = float(weight.std(correction=0))
    most = float((weight - weight.mean()).abs().max()) / deviation if deviation else 0.0
    return np.array([float(weight.mean()), deviation, most], np.float32)


def pack(results: dict[str, Tensor], whole: bool) -> dict[str, np.ndarray]:
    """Returns a case as arrays: of tables and buckets the rows with a gradient; all of a dense weight's gradient if
    `whole`, else four sums of it with random signs."""
    packed = {}
    for name, of in results.items():
        value = of.float().numpy()
        if name in ("dense.position_weight", "dense.time_weight"):
            rows = np.flatnonzero(np.abs(value).sum(axis=1))
            packed[f"{name}/rows"] = rows.astype(np.int16)
            value = value[rows]
        small = name in ("logits", "loss")
        packed[name] = value if whole or small else signed_sums(value)
    return packed


def signed_sums(value: np.ndarray) -> np.ndarray:
    """Returns four sums of all elements with random signs, of expectation zero for any difference that is spread."""
    signs = np.random.RandomState(value.size).randint(0, 2, (4, value.size)) * 2 - 1
    return (signs @ value.astype(np.float64).ravel()).astype(np.float32)


def save(cases: dict[str, dict[str, np.ndarray]]) -> None:
    """Writes FILE: each array, but rows of equal numbers of weights as one array in order of their names, for an array
    of a few numbers takes hundreds of bytes."""
    arrays = {}
    for case, results in cases.items():
        rows = [name for name in sorted(results) if results[name].shape in ((3,), (4,))]
        arrays |= {f"{case}/{name}": value for name, value in results.items() if name not in rows}
        if rows:
            arrays[f"{case}/rows"] = np.stack([results[name] for name in rows])
            arrays[f"{case}/names"] = np.array(" ".join(rows))
    np.savez_compressed(FILE, **arrays)  # type: ignore[arg-type]


def load() -> dict[str, dict[str, np.ndarray]]:
    """Returns what `save` was given."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(FILE) as file:
        for name in file.files:
            case, _, key = name.partition("/")
            cases.setdefault(case, {})[key] = file[name]
    for results in cases.values():
        if "names" in results:
            results |= zip(str(results.pop("names")).split(), results.pop("rows"), strict=True)
    return cases


def main(checkout: Path) -> None:
    open_checkout(checkout)
    cases = {
        case: pack(run(config, case_samples(), **options), whole=case == "still")
        for case, (config, options) in CASES.items()
    }
    save(cases | {"init": initial_laws()})
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
