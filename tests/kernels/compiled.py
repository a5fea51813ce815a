"""Compiles kernels for a Hopper GPU where there is none, and launches nothing: python -m tests.kernels.compiled

Prints the names of the kernels. The interpreter takes what the compiler refuses: values of another type at the end of a
loop than at its beginning, for example.
"""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # Triton decides when it is first imported

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels import launches


class Hopper:
    """Stands for Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(Hopper())
    run, compiled = JITFunction.run, set[str]()

    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **named: Any) -> Any:
        compiled.add(kernel.fn.__name__)
        return run(kernel, *arguments, warmup=True, **named)

    JITFunction.run = compile_only
    for dtype in (torch.float32, torch.bfloat16):
        launches.layers(192, dtype)
        launches.first_input(192, dtype)
        launches.lookups(1000, dtype)
    print(*sorted(compiled))


if __name__ == "__main__":
    main()
