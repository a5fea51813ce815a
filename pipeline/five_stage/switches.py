"""Requested options that are off, or partly off, with the reasons: each is logged once."""

import logging
from functools import cache

import torch
import torch.distributed as dist

from .options import FiveStageOptions

logger = logging.getLogger(__name__)


class Switches:
    """One pipeline's switches that are off."""

    def __init__(self) -> None:
        self.off: dict[str, str] = {}
        """Reasons by option."""
        self.alike = True
        """Whether all ranks have the same reasons, as at construction: rank 0 then logs for all."""

    def switch_off(self, option: str, why: str) -> None:
        """Switches an option off, and logs it once: on rank 0, or on the rank that alone has this reason."""
        if option not in self.off:
            self.off[option] = why
            self.warn("%s is off: %s", option, why)

    def on_host(self, options: FiveStageOptions, device: torch.device) -> None:
        """Switches off options that are useless on a CPU, without logging."""
        if device.type == "cuda":
            return
        if options.avoid_record_streams:
            self.off["avoid_record_streams"] = f"there are no streams on {device}"
        if options.pinned_d2h:
            why = f"{device} is the host: splits are exchanged in the same way, but nothing is pinned"
            self.off["pinned_d2h"] = why

    def half_a_thread(self, update_last: bool) -> None:
        """Records that the second thread does not launch the dense update. update_last: because it follows stage 4."""
        why = "clips by a norm over all ranks, whose collectives must keep their order with those of the backward"
        if update_last:
            why = "steps on what the embedding backward makes gradients for"
        self.switch_off("launch_threads", f"the second thread launches input dists only: the optimizer {why}")

    def warn_if(self, message: str, why: str | None) -> None:
        """Logs a warning with its reason, if there is one."""
        if why is not None:
            self.warn(message, why)

    def warn(self, message: str, *arguments: str) -> None:
        """Logs a warning."""
        if dist.get_rank() == 0 or not self.alike:
            _warn_once(message, *arguments)


@cache
def _warn_once(message: str, *arguments: str) -> None:
    """Logs a message once per process, whose training and evaluation pipelines mostly have the same messages."""
    logger.warning(message, *arguments)
