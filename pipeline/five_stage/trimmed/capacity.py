"""Number of a feature's ids that a rank may send to one owner of its table's rows: enough for nearly all batches."""

from math import inf, log

OVERFLOWS = 1e-6
"""Batches, of one module on all ranks together, that may have more ids for some owner than it has room for."""


def capacity(ids: int, share: float, risk: float) -> int:
    """Returns a number of `ids` draws that more than a `risk` of batches do not exceed, where each independently goes
    to one owner with probability `share`: the smallest c with P(more than c) <= risk by Chernoff's bound,
    P(X >= k) <= exp(-n KL(k/n || p)) for k > np (Hoeffding 1963, equation 2.1). At most `ids`."""
    if share >= 1:
        return ids
    low, high = min(int(ids * share), ids), ids  # `high` is enough, of what is below `low` nothing is said
    while low < high:
        middle = (low + high) // 2
        if ids * _divergence((middle + 1) / ids, share) >= -log(risk):
            high = middle
        else:
            low = middle + 1
    return high


def _divergence(q: float, p: float) -> float:
    """Returns Kullback and Leibler's divergence of coins of probability q and p, where q > p; else 0."""
    if q <= p:
        return 0.0
    if q > 1:
        return inf
    return q * log(q / p) + ((1 - q) * log((1 - q) / (1 - p)) if q < 1 else 0.0)
