"""Capacity for a feature's ids from a rank to one owner of its table's rows: enough for nearly all batches."""

from math import inf, log

OVERFLOWS = 1e-6
"""Share of batches, of one module over all ranks, that may exceed the capacity for some owner."""


def capacity(ids: int, share: float, risk: float) -> int:
    """Returns the capacity that at most a `risk` of batches exceed, if each of `ids` draws independently goes to one
    owner with probability `share`: the smallest c with P(more than c) <= risk by Chernoff's bound,
    P(X >= k) <= exp(-n KL(k/n || p)) for k > np (Hoeffding 1963, equation 2.1). At most `ids`."""
    if share >= 1:
        return ids
    low, high = min(int(ids * share), ids), ids  # `high` suffices; the bound says nothing below `low`
    while low < high:
        middle = (low + high) // 2
        if ids * _divergence((middle + 1) / ids, share) >= -log(risk):
            high = middle
        else:
            low = middle + 1
    return high


def _divergence(q: float, p: float) -> float:
    """Returns the Kullback-Leibler divergence of coins with probabilities q and p, if q > p; else 0."""
    if q <= p:
        return 0.0
    if q > 1:
        return inf
    return q * log(q / p) + ((1 - q) * log((1 - q) / (1 - p)) if q < 1 else 0.0)
