"""Kernels have one name: of the public function, its plain twin, its twin for GPUs, and its benchmark case."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "kernels"
BENCHMARKS = tuple(
    KERNELS / "benchmark" / f"{name}.py"
    for name in (
        "__main__",
        "attention",
        "dynamic_rows",
        "fp8",
        "input_dist",
        "single_ids",
        "sorted_ids",
        "tiers",
        "tokens",
    )
)
NO_KERNELS = {
    "__init__",
    "_call",
    "_cuda",
    "_dropout",
    "_eight_bits",
    "_placement_state",
    "_silu_attention_hopper",
    "_split_mix",
    "_triton",
    "peer_tensors",
    "stages",
}
PATHS = {
    path.stem: path
    for folder in (".", "input_dist", "embedding", "dense")
    for path in (KERNELS / folder).glob("*.py")
    if path.stem not in NO_KERNELS
}
MODULES = sorted(PATHS)


def functions(module: str) -> list[str]:
    """Functions of a module: those that it defines, and those that kernels/_call.py makes of a method."""
    names = []
    for node in ast.parse(PATHS[module].read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("function("):
            names.append(ast.unparse(node.targets[0]))
    return names


def twins(module: str) -> list[str]:
    """Functions of a module that have a twin for GPUs, in Triton or in CUDA C++."""
    return [name.partition("_")[2] for name in functions(module) if name.startswith(("triton_", "cuda_"))]


def benchmark_cases() -> Iterator[tuple[str, str]]:
    """The module and the function of each Case that a function of benchmark.CASES makes."""
    body = [node for path in BENCHMARKS for node in ast.parse(path.read_text()).body]
    (cases,) = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == "CASES"
    ]
    makers = {ast.unparse(maker): ast.literal_eval(key) for key, maker in zip(cases.keys, cases.values, strict=True)}
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name in makers:
            assert node.name == f"{makers[node.name]}_cases"
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "Case":
                    yield makers[node.name], ast.literal_eval(call.args[0])


@pytest.mark.parametrize("module", MODULES)
def test_each_kernel_has_a_plain_twin_a_test_and_a_benchmark_case_of_its_name(module: str) -> None:
    names = set(twins(module))
    assert names, "a module of kernels without a twin for GPUs"
    assert names <= set(functions(module)), "no public function of the twin's name"
    assert names == {name.removeprefix("plain_") for name in functions(module) if name.startswith("plain_")}
    assert (ROOT / "tests" / PATHS[module].relative_to(ROOT).with_name(f"test_{module}.py")).is_file()
    assert names == {name for of, name in benchmark_cases() if of == module}


def test_benchmark_cases_are_of_modules_here() -> None:
    assert {module for module, _ in benchmark_cases()} == set(MODULES)
