"""What attention must give, by numpy."""

from __future__ import annotations

import numpy as np


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool) -> np.ndarray:
    """By float64, of [batch, heads, tokens, head]; heads of keys and values are shared by neighbouring ones."""
    q, k, v = (each.astype("float64") for each in (q, k, v))
    k, v = (np.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
    scores = np.einsum("bhid,bhjd->bhij", q, k) * scale
    if causal:
        scores = np.where(np.tri(*scores.shape[2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v)
