"""CUDA C++ kernels, compiled at run time by NVRTC; NVRTC and cuda-bindings come with torch's CUDA builds."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_MAP_BYTES = 128  # size of a CUtensorMap; cuTensorMapEncodeTiled needs it aligned to 64 bytes
# Values of cuda.h's CUtensorMap* enumerations.
_UINT8, _BFLOAT16, _NO_INTERLEAVE, _SWIZZLE_128B, _L2_256B, _ZEROS = 0, 9, 0, 3, 3, 0


@functools.cache
def available() -> bool:
    """Whether kernels that use Hopper-only instructions (sm_90a) can be compiled and run on the current GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    try:
        importlib.import_module("cuda.bindings.driver")
        importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        logger.warning("CUDA C++ kernels are unavailable, using slower ones: %s (pip install cuda-bindings)", error)
        return False
    return True


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns the GPU's number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class Kernel:
    """A `__global__` function with one struct argument, on the current GPU; launches can be captured in graphs."""

    def __init__(self, source: Path, name: str, defines: dict[str, int], threads: int, shared_bytes: int) -> None:
        """Compiles `source`. defines: preprocessor macros. shared_bytes: dynamic shared memory of a block.

        RuntimeError with the compiler's messages if compilation fails.
        """
        self._threads, self._shared_bytes = threads, shared_bytes
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        cubin = _compile(source, defines)
        self._library = self._checked(self._driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0))
        kernel = self._checked(self._driver.cuLibraryGetKernel(self._library, name.encode()))
        self._function = self._checked(self._driver.cuKernelGetFunction(kernel))
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked(self._driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))

    def launch(self, blocks: int, argument: ctypes.Structure) -> None:
        """Launches on the current stream."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        stream = torch.cuda.current_stream().cuda_stream
        grid = (blocks, 1, 1, self._threads, 1, 1)
        shared_bytes, argument_pointers = self._shared_bytes, ctypes.addressof(pointers)
        self._checked(self._driver.cuLaunchKernel(self._function, *grid, shared_bytes, stream, argument_pointers, 0))

    def _checked(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA driver: {error}")
        return values[0] if values else None


def _compile(source: Path, defines: dict[str, int]) -> bytes:
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    options = [
        b"-arch=sm_90a",
        b"-std=c++17",
        f"-I{source.parent}".encode(),
        *(f"-D{name}={value}".encode() for name, value in defines.items()),
    ]
    _, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, None, None)
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC: {error} in {source}:\n{log.decode()}")
    cubin = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


class TensorMap(ctypes.Structure):
    """A CUtensorMap: tells the bulk tensor copy engine how to find boxes of a matrix."""

    _fields_ = (("words", ctypes.c_uint64 * (_MAP_BYTES // 8)),)


def tensor_map(matrix: Tensor, box_rows: int, box_columns: int) -> TensorMap:
    """Returns a map for boxes of box_rows rows and box_columns columns, 128 bytes wide and stored in shared memory with
    the 128-byte swizzle.

    matrix: bf16 or an 8-bit format; row stride any multiple of 16 bytes, columns contiguous. Elements of a box outside
    the matrix are read as 0 and not written.
    """
    formats = {torch.bfloat16: _BFLOAT16, torch.float8_e4m3fn: _UINT8, torch.float8_e5m2: _UINT8}
    assert matrix.dtype in formats and matrix.dim() == 2 and matrix.stride(1) == 1, "a matrix in bf16 or 8 bits"
    assert box_columns * matrix.itemsize == 128 and matrix.stride(0) * matrix.itemsize % 16 == 0, "aligned rows"
    memory = ctypes.create_string_buffer(_MAP_BYTES + 64)
    at = -(-ctypes.addressof(memory) // 64) * 64
    rows, columns = matrix.shape
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        formats[matrix.dtype],
        2,
        ctypes.c_void_p(matrix.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(matrix.stride(0) * matrix.itemsize),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128B,
        _L2_256B,
        _ZEROS,
    )
    assert error == 0, f"cuTensorMapEncodeTiled: {error}"
    return TensorMap.from_buffer_copy(ctypes.string_at(at, _MAP_BYTES))


@functools.cache
def _driver() -> ctypes.CDLL:
    # cuda-bindings' own cuTensorMapEncodeTiled writes to its object's address, which is rarely aligned to 64 bytes.
    return ctypes.CDLL("libcuda.so.1")
