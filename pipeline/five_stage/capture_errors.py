"""Reasons of failed captures, with the line of the user's model in which the capture failed."""

import linecache
import logging
import re
import traceback
from pathlib import Path

import torch
import torchrec

from . import reasons
from .cuda_graph import record

logger = logging.getLogger(__name__)

_OTHERS = (
    *(str(Path(path).parent) for path in (torch.__file__, torchrec.__file__, __file__)),
    record.__code__.co_filename,
)
_CAPTURING = re.compile(r"captur", re.IGNORECASE)
"""Part of CUDA's error messages about calls that are not allowed in a capture."""
_NUMBER = "keep the number a tensor on the device, or give it as a field of the batch that is no tensor"
_PAD = "pad to a length that is known before: to_padded_dense(desired_length=...)"
_WHERE = "choose by torch.where or by a multiplication with the mask, whose shapes do not depend on the values"
_INSTEAD = (
    (r"\blen\w*(\(\))?\.a?max\(|\.lengths\(\)\.a?max\(|max_length|to_padded_dense\(\)", _PAD),
    (r"\.item\(|\.tolist\(|\bint\(|\bfloat\(|\bbool\(", _NUMBER),
    (r"\.max\(|\.amax\(", _PAD),
    (r"nonzero|masked_select|unique|\[[^\]]*(mask|==|!=|>|<)[^\]]*\]", _WHERE),
    (r"\.cpu\(|\.numpy\(|\bprint\(|\.to\(", "read it after the step, from what progress() returns"),
    (
        r"torch\.(tensor|arange|zeros|ones|full|as_tensor)\(",
        "make the tensor on the device (device=...), or once, as a buffer of the module",
    ),
    (r"repeat_interleave", "give output_size"),
    (r"^\s*(if|while|assert)\b", "choose by torch.where, or by a number that the host has"),
)
"""Patterns of lines that read the device, and the replacement to suggest."""


def told(error: BaseException) -> str:
    """Returns the error with the innermost line of the user's own code, and a replacement to suggest if that line read
    the device."""
    error = _first(error)
    message = f"{type(error).__name__}: {_first_line(error)}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OTHERS)]
    if not frames:
        logger.warning("a capture failed outside of the model's own code", exc_info=error)
        return message
    frame = frames[-1]
    line = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    place = f"{frame.filename}:{frame.lineno} `{line}`"
    if not _CAPTURING.search(str(error)):
        return f"{message} (at {place})"
    instead = next((what for pattern, what in _INSTEAD if re.search(pattern, line)), "keep it on the device")
    return reasons.READS_DEVICE(line=place, instead=instead)


def _first(error: BaseException) -> BaseException:
    """Returns the first error within a capture: the end of a failed capture raises another one, without a line."""
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    capturing = [one for one in chain if _CAPTURING.search(str(one))]
    if len(capturing) == 1 and capturing[0] is error and len(chain) > 1:
        return chain[1]
    return capturing[-1] if capturing else error


def _first_line(error: BaseException) -> str:
    """Returns the first line of a CUDA error, which continues with advice about environment variables."""
    return str(error).split("\n", 1)[0] if _CAPTURING.search(str(error)) else str(error)
