"""Attention and its gradients from the definition: float64 numpy, the whole score matrix.

It shares nothing with the code under test but the mask of dropout, which is a hash by design.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: Distances from here on share the last bucket of relative positions.
FARTHEST = 32


@dataclass(frozen=True)
class Mask:
    """Who may attend to whom; see `MaskInfo`.

    Attributes:
        q_segments, kv_segments: [b, s] and [b, t], 0 = padding.
        q_index, kv_index: order within a segment.
        in_order: queries and keys are the same tokens of packed rows.
    """

    q_segments: np.ndarray
    kv_segments: np.ndarray
    q_index: np.ndarray
    kv_index: np.ndarray
    causal: bool = True
    in_order: bool = False

    @classmethod
    def packed(cls, segments: Any, causal: bool = True) -> Mask:
        """Self-attention of packed rows: order counts from the first token of a segment."""
        segments = np.asarray(segments)
        index = np.zeros_like(segments)
        for row, order in zip(segments, index, strict=True):
            for segment in np.unique(row):
                start = np.flatnonzero(row == segment)[0]
                order[row == segment] = np.flatnonzero(row == segment) - start
        return cls(segments, segments, index, index, causal, in_order=True)

    def allowed(self, window: int | None, chunk: int | None) -> np.ndarray:
        """Pair by pair, from the definition: bool [b, s, t]."""
        b, s = self.q_segments.shape
        t = self.kv_segments.shape[1]
        allowed = np.zeros((b, s, t), bool)
        for row, i, j in np.ndindex(b, s, t):
            segment, query = int(self.q_segments[row, i]), int(self.q_index[row, i])
            key = int(self.kv_index[row, j])
            ok = segment != 0 and segment == int(self.kv_segments[row, j])
            if self.causal:
                ok = ok and key <= query
            if window:  # the last `window` tokens, oneself included; both ways if bidirectional
                ok = ok and query - key < window and (self.causal or key - query < window)
            if chunk:
                ok = ok and query // chunk == key // chunk
            allowed[row, i, j] = ok
        return allowed

    def buckets(self, count: int) -> np.ndarray:
        """Return the bucket of each pair [b, s, t], from T5's definition."""
        b, s = self.q_segments.shape
        t = self.kv_segments.shape[1]
        found = np.zeros((b, s, t), int)
        one_way = count if self.causal else count // 2
        exact = one_way // 2
        for row, i, j in np.ndindex(b, s, t):
            ahead = int(self.kv_index[row, j]) - int(self.q_index[row, i])
            distance = max(-ahead, 0) if self.causal else abs(ahead)
            bucket = distance
            if distance >= exact:
                share = np.log(distance / exact) / np.log(FARTHEST / exact)
                bucket = min(exact + int(share * (one_way - exact) + 1e-6), one_way - 1)
            found[row, i, j] = bucket + (one_way if ahead > 0 and not self.causal else 0)
        return found


@dataclass(frozen=True)
class Case:
    """One call of attention in float64, with all that its gradients need; see `attend`.

    Attributes:
        relative: a bias for each bucket of distances up to `FARTHEST` and each head, [n, h].
        kept: which weights dropout keeps, bool [b, h, s, t]; None = all.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: Mask
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: np.ndarray | None = None
    scale: float | None = None
    bias: np.ndarray | None = None
    alibi: Any = None
    relative: np.ndarray | None = None
    kept: np.ndarray | None = None
    rate: float = 0.0

    def run(self, d_out: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The output, and with `d_out` [b, s, h, d] the gradients of sum(out * d_out) by name."""
        q, k, v = (np.asarray(x, np.float64) for x in (self.q, self.k, self.v))
        repeat = q.shape[2] // k.shape[2]
        k, v = (np.repeat(x, repeat, axis=2) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        allowed = self.mask.allowed(self.window, self.chunk)[:, None]

        scores = np.einsum("bshk,bthk->bhst", q, k) * scale
        slope = 1.0
        if self.soft_cap:
            slope = 1 - np.tanh(scores / self.soft_cap) ** 2
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        if self.bias is not None:
            scores = scores + np.asarray(self.bias, np.float64)
        if self.alibi is not None:
            distance = self.mask.kv_index[:, None, None, :] - self.mask.q_index[:, None, :, None]
            slopes = np.asarray(self.alibi.slopes)[:, None, None] * self.alibi.factor
            scores = scores + slopes * distance
        if self.relative is not None:
            buckets = self.mask.buckets(len(self.relative))
            table = np.asarray(self.relative, np.float64)
            scores = scores + np.moveaxis(table[buckets], -1, 1)
        scores = np.where(allowed, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        sinks = np.full((q.shape[2], 1, 1), -np.inf)
        if self.sinks is not None:
            sinks = np.asarray(self.sinks, np.float64)[:, None, None]
        top = np.maximum(top, sinks)
        top[top == -np.inf] = 0  # a query that sees nothing
        weights, sink = np.exp(scores - top), np.exp(sinks - top)
        total = weights.sum(-1, keepdims=True) + sink
        total[total == 0] = 1
        weights, sink = weights / total, sink / total
        factor = 1.0 if self.kept is None else self.kept / (1 - self.rate)
        out = np.einsum("bhst,bthd->bshd", weights * factor, v)
        if d_out is None:
            return {"out": out}

        d_out = np.asarray(d_out, np.float64)
        d_weights = np.einsum("bshd,bthd->bhst", d_out, v) * factor
        mean = (weights * d_weights).sum(-1, keepdims=True)
        d_scores = weights * (d_weights - mean)
        found = {"out": out, "v": np.einsum("bhst,bshd->bthd", weights * factor, d_out)}
        if self.sinks is not None:
            found["sinks"] = -(sink * mean).sum((0, 2, 3))
        if self.bias is not None:
            single = tuple(axis for axis in range(4) if self.bias.shape[axis] == 1)
            found["bias"] = d_scores.sum(single, keepdims=True)
        if self.relative is not None:
            found["relative"] = np.zeros(self.relative.shape)
            np.add.at(found["relative"], buckets, np.moveaxis(d_scores, 1, -1))
        d_scores = d_scores * slope * scale
        found["q"] = np.einsum("bhst,bthk->bshk", d_scores, k)
        found["k"] = np.einsum("bhst,bshk->bthk", d_scores, q)
        for name in ("k", "v"):
            x = found[name]
            found[name] = x.reshape(*x.shape[:2], -1, repeat, x.shape[-1]).sum(3)
        return found


def error(got: Any, expected: np.ndarray) -> float:
    """Largest error relative to the largest expected value; infinite where `got` is not finite."""
    difference = float(np.abs(np.asarray(got, np.float64) - expected).max())
    return difference / (float(np.abs(expected).max()) or 1.0) if difference < np.inf else np.inf
