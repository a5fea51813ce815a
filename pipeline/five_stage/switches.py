"""Requested options that are off, or partly off, with the reasons: each is logged once."""

import logging
from functools import cache

import torch
import torch.distributed as dist

from . import reasons
from .options import FiveStageOptions
from .peers.memory import why_no_peers

logger = logging.getLogger(__name__)


class Switches:
    """One pipeline's switches that are off."""

    def __init__(self, options: FiveStageOptions) -> None:
        self._options = options
        self.off: dict[str, str] = {}
        """Reasons by option."""
        self.alike = True
        """Whether all ranks have the same reasons, as at construction: rank 0 then logs for all."""

    def switch_off(self, option: str, why: str) -> None:
        """Switches an option off, and logs it once: on rank 0, or on the rank that alone has this reason."""
        if option not in self.off:
            self.off[option] = why
            self.warn("%s is off: %s", option, why)
        if option == "cuda_graph":
            self._without_graph()

    def no_iteration(self, why: str) -> str:
        """Records that there is no graph of whole iterations, and logs it; returns a sentence on what there is."""
        what = f"for whole iterations, and on for the dense part: {why}"
        self.warn("cuda_graph is off %s", what)
        self._without_graph()
        return what

    def _without_graph(self) -> None:
        if self._options.peer_memory:
            self.switch_off("peer_memory", reasons.PEERS_NO_GRAPH())

    def peers(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Returns whether graphs exchange through peer memory, on all ranks of a group. Collective where requested."""
        if self._options.peer_memory and (why := why_no_peers(group, device)) is not None:
            self.switch_off("peer_memory", why)
        return self._options.peer_memory and "peer_memory" not in self.off

    def on_host(self, device: torch.device) -> None:
        """Switches off options that are useless on a CPU, without logging."""
        if device.type == "cuda":
            return
        if self._options.avoid_record_streams:
            self.off["avoid_record_streams"] = f"there are no streams on {device}"
        if self._options.pinned_d2h:
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
