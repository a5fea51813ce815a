"""Options that were asked for and are off, or off in part, and why: each is said once in the log."""

import logging
from functools import cache

import torch
import torch.distributed as dist

from .options import FiveStageOptions

logger = logging.getLogger(__name__)


class Switches:
    """Switches of one pipeline that are off."""

    def __init__(self) -> None:
        self.off: dict[str, str] = {}
        """Reasons by option."""
        self.alike = True
        """Whether all ranks have the same reasons, as at construction: rank 0 speaks for them."""

    def switch_off(self, option: str, why: str) -> None:
        """Says it once: on rank 0, or where a rank alone has this reason, there."""
        if option not in self.off:
            self.off[option] = why
            self.warn("%s is off: %s", option, why)

    def on_host(self, options: FiveStageOptions, device: torch.device) -> None:
        """Switches off what a pipeline on the host has no use for, which needs no saying."""
        if device.type == "cuda":
            return
        if options.avoid_record_streams:
            self.off["avoid_record_streams"] = f"there are no streams on {device}"
        if options.pinned_d2h:
            why = f"{device} is the host: splits are exchanged in the same way, but nothing is pinned"
            self.off["pinned_d2h"] = why

    def half_a_thread(self, update_last: bool) -> None:
        """The second thread does not launch the dense update. update_last: as that comes after stage 4."""
        why = "clips by a norm over all ranks, whose collectives must keep their order with those of the backward"
        if update_last:
            why = "steps on what the embedding backward makes gradients for"
        self.switch_off("launch_threads", f"the second thread launches input dists only: the optimizer {why}")

    def warn(self, message: str, *arguments: str) -> None:
        """Logs a warning."""
        if dist.get_rank() == 0 or not self.alike:
            _warn_once(message, *arguments)


@cache
def _warn_once(message: str, *arguments: str) -> None:
    """Says it once a process, whose pipelines for training and for evaluation have mostly the same to say."""
    logger.warning(message, *arguments)
