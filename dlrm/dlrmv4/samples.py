"""The interface between DLRMv4's data and its model: the samples of one rank and one iteration, as flat tensors."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Samples:
    """B samples of one rank; their histories joined, oldest event first."""

    lengths: Tensor
    """Number of events in the history of each sample, int32 [B], 0 or more; T is their sum."""
    item: Tensor
    """Item of each event, int32 [T]: rows of table item_id, as are an event's artist and album of theirs."""
    artist: Tensor
    album: Tensor
    timestamp: Tensor
    """Time of each event, int32 [T], in seconds."""
    action: Tensor
    """Action bits of each event, uint8 [T]: 1 listen+, 2 like, 4 skip."""
    candidate_item: Tensor
    """Item to score, int32 [B]; its artist and album likewise."""
    candidate_artist: Tensor
    candidate_album: Tensor
    query_timestamp: Tensor
    """Time of the last event of the history, int32 [B]; of the anchor where the history is empty."""
    context: Tensor
    """Rows of the eight context tables, int32 [8, B]: uid, user_x_artist, user_x_album, user_x_hour, item_x_hour,
    artist_x_hour, user_x_is_organic, user_x_artist_x_hour."""
    labels: Tensor
    """Whether the candidate was listened to, float32 [B], 0 or 1."""
