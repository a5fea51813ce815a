"""SiLU attention over jagged sequences: against a loop over tokens and autograd, Triton and CUDA against plain."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import TensorMap, available
from dlrm_bench.kernels.dense import _silu_attention_hopper as hopper
from dlrm_bench.kernels.dense import silu_attention
from dlrm_bench.kernels.dense._silu_attention_hopper import Arguments, list_items
from dlrm_bench.kernels.dense.silu_attention import (
    Sequences,
    applies,
    cuda_silu_attention_backward,
    cuda_silu_attention_forward,
    plain_silu_attention_backward,
    plain_silu_attention_forward,
    silu_attention_backward,
    silu_attention_forward,
    triton_silu_attention_backward,
    triton_silu_attention_forward,
)
from tests.kernels.devices import DEVICE, needs_triton

# Lengths and targets of sequences.
CASES = {
    "one token": ([1], [1]),
    "none": ([0, 0], [0, 0]),
    "an empty one between": ([3, 0, 70], [0, 0, 5]),
    "targets over a tile's edge": ([130, 65, 64], [70, 2, 64]),
    "no targets": ([64, 129], [0, 0]),
}
HEADS, DEPTH, WIDTH = 2, 16, 32


def draw(case: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Sequences]:
    """q, k, v as slices of one projection, the output's gradient, and the sequences; two tokens belong to none."""
    lengths, targets = CASES[case]
    generator = torch.Generator().manual_seed(len(lengths))
    tokens = sum(lengths) + 2
    projected = torch.randn(tokens, HEADS * (2 * DEPTH + WIDTH), generator=generator).to(dtype).to(DEVICE)
    q, k, v = projected.split([HEADS * DEPTH, HEADS * DEPTH, HEADS * WIDTH], dim=1)
    grad = torch.randn(tokens, HEADS, WIDTH, generator=generator).to(dtype).to(DEVICE)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    sequences = Sequences(offsets, torch.tensor(targets, device=DEVICE), max(lengths) + 3)
    return q.unflatten(1, (HEADS, -1)), k.unflatten(1, (HEADS, -1)), v.unflatten(1, (HEADS, -1)), grad, sequences


def by_token(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    """The definition, token by token: sum over the keys that it sees of silu(q k / sqrt(D)) v / max_length."""
    rows = [v[:0]]
    offsets = sequences.offsets.tolist()
    for start, end, targets in zip(offsets, offsets[1:], sequences.targets.tolist(), strict=False):
        for token in range(start, end):
            seen = [*range(start, min(token, end - targets)), token]
            score = torch.einsum("hd,jhd->jh", q[token], k[seen]) * q.shape[2] ** -0.5
            weight = torch.nn.functional.silu(score) / sequences.max_length
            rows.append(torch.einsum("jh,jhv->hv", weight, v[seen])[None])
    return torch.cat(rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (silu_attention_forward, silu_attention_backward),
        (plain_silu_attention_forward, plain_silu_attention_backward),
        pytest.param(triton_silu_attention_forward, triton_silu_attention_backward, marks=needs_triton),
    ],
    ids=["chosen", "plain", "triton"],
)
def test_equals_the_definition_and_its_derivative(forward, backward, case: str) -> None:
    *inputs, grad, sequences = draw(case)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = by_token(*exact, sequences)
    of_inputs = torch.autograd.grad(expected, exact, grad[: len(expected)].double(), allow_unused=True)

    out = torch.full_like(grad, torch.nan)
    forward(*inputs, sequences, out)
    torch.testing.assert_close(out[:-2].double(), expected, rtol=1e-5, atol=1e-6)
    chosen = forward is silu_attention_forward  # which fills what lies past the last sequence; its twins leave it alone
    assert not out[-2:].any() if chosen else out[-2:].isnan().all()

    grads = [torch.full_like(tensor, torch.nan).contiguous() for tensor in inputs]
    backward(grad, *inputs, sequences, *grads)
    for ours, theirs in zip(grads, of_inputs, strict=True):
        assert not ours[-2:].any() if chosen else ours[-2:].isnan().all()
        if theirs is not None:
            torch.testing.assert_close(ours[:-2].double(), theirs[:-2], rtol=1e-5, atol=1e-6)


@needs_triton
def test_small_tiles_equal_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of fp32 on GPUs, and of wide heads."""
    monkeypatch.setattr(silu_attention, "_TILE", 16)
    *inputs, grad, sequences = draw("an empty one between")
    outs = torch.zeros(2, *grad.shape, device=DEVICE)
    triton_silu_attention_forward(*inputs, sequences, outs[0])
    plain_silu_attention_forward(*inputs, sequences, outs[1])
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
    ours, plain = ([torch.zeros_like(tensor) for tensor in inputs] for _ in range(2))
    triton_silu_attention_backward(grad, *inputs, sequences, *ours)
    plain_silu_attention_backward(grad, *inputs, sequences, *plain)
    for of_ours, of_plain in zip(ours, plain, strict=True):
        torch.testing.assert_close(of_ours, of_plain, rtol=1e-5, atol=1e-6)


@needs_triton
def test_equal_inputs_give_equal_bits() -> None:
    *inputs, grad, sequences = draw("targets over a tile's edge")
    runs = []
    for _ in range(2):
        grads = [torch.zeros_like(tensor) for tensor in inputs]
        triton_silu_attention_backward(grad, *inputs, sequences, *grads)
        runs.append(torch.cat([tensor.flatten() for tensor in grads]))
    assert torch.equal(*runs)


@pytest.mark.gpu
def test_bf16_on_a_gpu() -> None:
    *inputs, grad, sequences = draw("targets over a tile's edge", torch.bfloat16)
    outs = torch.zeros_like(grad), torch.zeros_like(grad)
    triton_silu_attention_forward(*inputs, sequences, outs[0])
    plain_silu_attention_forward(*inputs, sequences, outs[1])
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-3)
    grads = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(2)]
    triton_silu_attention_backward(grad, *inputs, sequences, *grads[0])
    plain_silu_attention_backward(grad, *inputs, sequences, *grads[1])
    for ours, plain in zip(*grads, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-3)


def test_shapes_are_checked() -> None:
    q, k, v, grad, sequences = draw("one token")
    with pytest.raises(AssertionError, match="power of two"):
        silu_attention_forward(q[:, :, :8], k[:, :, :8], v, sequences, grad)
    with pytest.raises(AssertionError, match="must be contiguous"):
        silu_attention_forward(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, sequences, grad)


def test_sequences_are_checked() -> None:
    q, k, v, grad, sequences = draw("an empty one between")
    targets, strided = sequences.targets, torch.stack([sequences.offsets] * 2, dim=1)[:, 0]
    for wrong, message in (
        ({"targets": targets[:1]}, r"targets: \[B\]"),  # PyTorch would use it for all sequences
        ({"targets": targets.byte()}, "int32 or int64"),
        ({"targets": targets[:1].expand(3)}, "contiguous"),
        ({"offsets": strided}, "contiguous"),
    ):
        given = sequences._replace(**wrong)
        with pytest.raises(AssertionError, match=message):
            silu_attention_forward(q, k, v, given, torch.empty_like(grad))
        with pytest.raises(AssertionError, match=message):
            silu_attention_backward(grad, q, k, v, given, q.clone(), k.clone(), v.clone())


def test_hoppers_kernels_are_not_for_a_cpu_nor_for_other_sizes() -> None:
    assert not applies(torch.zeros(8, 4, 128, dtype=torch.bfloat16))
    if available():
        tokens = torch.zeros(9, 4 * 128 + 8, dtype=torch.bfloat16, device="cuda")
        assert applies(tokens[:, :512].unflatten(1, (4, 128)), tokens[:, 8:].unflatten(1, (4, 128)))
        assert not applies(tokens[:, 4:516].unflatten(1, (4, 128)))  # 8 bytes past a multiple of 16
        assert not applies(torch.zeros(8, 4, 64, dtype=torch.bfloat16, device="cuda"))
        assert not applies(torch.zeros(8, 4, 128, device="cuda"))


def test_arguments_are_laid_out_as_in_cuda() -> None:
    """Where the compiler aligns them: maps at multiples of 64, pointers of 8."""
    assert (Arguments.x.offset, Arguments.y.offset, Arguments.out.offset) == (0, 256, 512)
    assert Arguments.items.offset % 8 == 0
    assert ctypes.sizeof(Arguments) % 64 == 0


class Recorder:
    """In place of compiled kernels, on a CPU: keeps what they are launched with."""

    def __init__(self, name: int, launches: list[tuple[int, int, dict[str, int]]]) -> None:
        self._name, self._launches = name, launches

    def launch(self, blocks: int, argument: ctypes.Structure) -> None:
        names = [name for name, kind, *_ in argument._fields_ if kind in (ctypes.c_void_p, ctypes.c_int)]
        self._launches.append((self._name, blocks, {name: getattr(argument, name) for name in names}))


def test_wrapper_launches_passes_on_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 sequences of at most 200 tokens, 4 rows of pieces: at most 2 heads * (7 + 3) * 5 / 2 = 50 pieces."""
    launches: list[tuple[int, int, dict[str, int]]] = []
    monkeypatch.setattr(hopper, "tensor_map", lambda matrix, rows, columns: TensorMap())
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper, "_kernel", lambda mode, device: Recorder(mode, launches))
    monkeypatch.setattr(hopper, "_items_kernel", lambda device: Recorder(-1, launches))
    monkeypatch.setattr(silu_attention, "_PASS_PIECES", 20)
    q, k, v, grad, dq, dk, dv = torch.zeros(7, 400, 2, 128, dtype=torch.bfloat16).unbind()
    sequences = Sequences(torch.tensor([0, 200, 300, 400]), torch.ones(3, dtype=torch.int64), 200)
    cuda_silu_attention_backward(grad, q, k, v, sequences, dq, dk, dv)

    (items_name, blocks, items), *of_passes = launches
    assert (items_name, blocks, items["sequences"], items["heads"]) == (-1, 3, 3, 2)
    assert (items["offsets_bytes"], items["max_length"], items["passes"], items["pieces"]) == (8, 200, 3, 20)
    assert [mode for mode, *_ in of_passes] == [hopper.KEY, hopper.QUERY] * 3
    memory = of_passes[0][2]["pieces"]
    for i, (_, blocks, given) in enumerate(of_passes):
        assert blocks == 2 * (4 + 3)  # as many as tiles
        assert given["items"] == items["items"]
        assert given["range"] == items["first"] + 4 * (i // 2)
        assert given["taken"] == items["taken"] + 4 * i
        assert given["pieces"] == memory - i // 2 * 20 * 64 * 64 * 2

    launches.clear()
    cuda_silu_attention_forward(q, k, v, sequences, grad)
    assert [mode for mode, *_ in launches] == [-1, hopper.FORWARD]
    assert launches[0][2]["passes"] == 1
    launches.clear()
    cuda_silu_attention_forward(q[:0], k[:0], v[:0], sequences, grad[:0])
    assert not launches


def needs_hopper(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
    return pytest.mark.gpu(skip(test))


# Lengths and targets: around the kernels' tiles of 64 and 128, and many sequences on few multiprocessors.
HOPPER_CASES = {
    **{str(length): ([length], [min(1, length)]) for length in (0, 1, 63, 64, 65, 127, 128, 129, 1000, 2048, 4095)},
    "mixed": ([0, 1, 63, 64, 0, 65, 127, 128, 129, 300, 1000, 5, 0], [0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0]),
    "targets": ([130, 65, 64, 200, 513], [70, 2, 64, 150, 0]),
    "many": ([7 * i % 400 for i in range(300)], [0] * 300),
}


def draw_for_hopper(lengths: list[int], targets: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Sequences]:
    """As `draw`, with MLPerf DLRMv4's heads; the two tokens that belong to no sequence are no numbers."""
    tokens, heads = sum(lengths) + 2, (4, 128)
    projected = torch.randn(tokens, 4 * 512, device="cuda").bfloat16()
    grad = torch.randn(tokens, *heads, device="cuda").bfloat16()
    projected[-2:], grad[-2:] = torch.nan, torch.nan
    _, v, q, k = (part.unflatten(1, heads) for part in projected.chunk(4, dim=1))
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return q, k, v, grad, Sequences(offsets, torch.tensor(targets, device="cuda"), max(1, *lengths))


def run_on_hopper(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sequences: Sequences) -> list[Tensor]:
    """Returns out, dq, dk and dv, the latter as slices of one matrix, which was full of numbers that are none."""
    out = torch.full_like(grad, torch.nan)
    cuda_silu_attention_forward(q, k, v, sequences, out)
    of_projected = torch.full((len(q), 3 * 512), torch.nan, device="cuda", dtype=torch.bfloat16)
    grads = [part.unflatten(1, (4, 128)) for part in of_projected.chunk(3, dim=1)]
    cuda_silu_attention_backward(grad, q, k, v, sequences, *grads)
    return [out, *grads]


def in_double(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sequences: Sequences) -> list[Tensor]:
    """The same by the plain functions in float64, one sequence after the other."""
    outs = [torch.full(grad.shape, torch.nan, device="cuda", dtype=torch.float64) for _ in range(4)]
    offsets = sequences.offsets.tolist()
    for start, end, targets in zip(offsets, offsets[1:], sequences.targets, strict=False):
        # On sequences padded to their own length, then divided by what they are to be divided by.
        one = Sequences(torch.tensor([0, end - start], device="cuda"), targets[None], max(1, end - start))
        exact = [tensor[start:end].double() for tensor in (q, k, v, grad)]
        results = [torch.zeros_like(exact[0]) for _ in range(4)]
        plain_silu_attention_forward(*exact[:3], one, results[0])
        plain_silu_attention_backward(exact[3], *exact[:3], one, *results[1:])
        for out, result in zip(outs, results, strict=True):
            out[start:end] = result * one.max_length / sequences.max_length
    return outs


@needs_hopper
@pytest.mark.parametrize("case", HOPPER_CASES)
def test_cuda_equals_plain_in_double(case: str) -> None:
    drawn = draw_for_hopper(*HOPPER_CASES[case])
    for got, expected in zip(run_on_hopper(*drawn), in_double(*drawn), strict=True):
        assert got[-2:].isnan().all()
        error = (got[:-2].double() - expected[:-2]).norm()
        assert error <= 5e-3 * expected[:-2].norm(), error / expected[:-2].norm()


@needs_hopper
def test_cuda_keeps_what_is_no_number_in_its_sequence() -> None:
    """A tile has rows of the next sequence, whose weights are 0, but 0 times infinity is none."""
    *tensors, sequences = draw_for_hopper([200, 70, 330], [1, 1, 1])
    for value in (torch.nan, torch.inf):
        for tensor in tensors:
            tensor[200:270] = value
        for got in run_on_hopper(*tensors, sequences):
            assert got[:200].isfinite().all()
            assert got[270:-2].isfinite().all()


@needs_hopper
def test_cuda_takes_great_scores() -> None:
    """Where tanh has come to its end, weights are the scores or 0."""
    *tensors, sequences = draw_for_hopper([300], [1])
    for tensor in tensors[:2]:
        tensor *= 30
    drawn = *tensors, sequences
    for got, expected in zip(run_on_hopper(*drawn), in_double(*drawn), strict=True):
        error = (got[:-2].double() - expected[:-2]).norm()
        assert error <= 5e-3 * expected[:-2].norm(), error / expected[:-2].norm()


@needs_hopper
def test_cuda_gives_equal_bits_in_graphs_beside_other_work() -> None:
    lengths = [i * 37 % 900 for i in range(60)]
    drawn = draw_for_hopper(lengths, [min(1, length) for length in lengths])
    q, k, v, grad, sequences = drawn
    expected = run_on_hopper(*drawn)
    results = [torch.empty_like(grad) for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_silu_attention_forward(q, k, v, sequences, results[0])
        cuda_silu_attention_backward(grad, q, k, v, sequences, *results[1:])
    beside, factor = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(30):
        for result in results:
            result.fill_(torch.nan)
        with torch.cuda.stream(beside):
            product = factor @ factor
        graph.replay()
        for got, first in zip(results, expected, strict=True):
            assert torch.equal(got[:-2], first[:-2])
    assert product.isfinite().all()


@needs_hopper
def test_backward_in_passes_gives_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of few sequences and heads each, of less than one, and some without any."""
    lengths = [129, 0, 700, 128, 1, 700, 64]
    drawn = draw_for_hopper(lengths, [min(1, length) for length in lengths])
    expected = run_on_hopper(*drawn)
    for pieces in (150, 40):
        monkeypatch.setattr(silu_attention, "_PASS_PIECES", pieces)
        for got, first in zip(run_on_hopper(*drawn), expected, strict=True):
            assert torch.equal(got[:-2], first[:-2])


@needs_hopper
def test_cuda_cuts_what_is_longer_than_it_may_be() -> None:
    """Instead of writing past its memory; what does not fit has no gradient."""
    *tensors, sequences = draw_for_hopper([300, 100], [0, 0])
    got = run_on_hopper(*tensors, sequences._replace(max_length=128))
    expected = run_on_hopper(*(tensor[:128] for tensor in tensors), Sequences(*_one(128), 128))
    for ours, alone in zip(got, expected, strict=True):
        assert torch.equal(ours[:128], alone)
        assert ours[128:300].isnan().all()
        assert ours[300:400].isfinite().all()


def _one(length: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([0, length], device="cuda"), torch.tensor([0], device="cuda")


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_items_are_all_tiles_longest_sequences_first(dtype: torch.dtype) -> None:
    lengths, targets = [129, 0, 700, 128, 1, 700], [1, 0, 5, 1, 1, 0]
    q, *_, sequences = draw_for_hopper(lengths, targets)
    offsets = sequences.offsets
    as_dtype = Sequences(offsets.to(dtype), sequences.targets.to(dtype), 700)
    starts, expected, pieces = offsets.tolist(), [], 0
    for of in (2, 5, 0, 3, 4):
        history, rows = lengths[of] - targets[of], -(-lengths[of] // 64)
        for head in range(4):
            for tile in range(-(-lengths[of] // 128)):
                expected.append([starts[of], lengths[of], history, tile | head << 16, pieces])
            pieces += rows * (rows + 1) // 2
    assert 3 * 150 < pieces < 4 * 150
    work = list_items(q, *as_dtype, 5, 150)
    begins = [sum(item[4] < number * 150 for item in expected) for number in range(6)]
    assert work.first.tolist() == begins
    assert work.taken.eq(0).all()
    assert work.items[: len(expected), :5].tolist() == expected


@needs_hopper
def test_rows_past_the_last_sequence_are_zero_on_hopper() -> None:
    q, k, v, grad, sequences = drawn = draw_for_hopper([300, 77], [1, 1])
    results = [torch.full_like(grad, torch.nan) for _ in range(4)]
    assert applies(q, k, v, grad, *results)
    silu_attention_forward(q, k, v, sequences, results[0])
    silu_attention_backward(grad, q, k, v, sequences, *results[1:])
    for got, alone in zip(results, run_on_hopper(*drawn), strict=True):
        assert torch.equal(got[:-2], alone[:-2])
        assert not got[-2:].any()
