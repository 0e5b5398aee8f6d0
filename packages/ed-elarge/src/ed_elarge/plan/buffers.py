"""How many temporary values a compiler needs: one row for each backend, from compiled train steps.

The numbers come from memory analyses of compiled train steps (`docs/plan.md` states the errors).
They count values of one token in the backward pass of one layer, in units of the sizes of
`ed_elarge.plan.activations.LayerValues`.

Legend: d hidden, f intermediate, q queries, k keys (as many as values).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ed_elarge.plan.activations import LayerValues


@dataclass(frozen=True)
class Buffers:
    """Temporary values of one backend.

    Attributes:
        d, f, q, kv: values of a token in the backward pass of a layer whose values are all kept.
        redone_f: further values of the feed-forward layer if a policy recomputes them.
        plain_f, plain_redone_f: the same for a feed-forward layer without a gate.
        overlap: share of the values of a further layer whose backward pass overlaps.
        rows: least values of a token and an expert, in units of the stream: the rows are sorted by
            expert, multiplied, and added to their tokens.
        weights: gathered copies of the weights of a layer.
        experts: copies of the experts of a layer that a device holds.
        tables: copies of the head's size (as stored) that exist while the layers run backward.
        softmax: copies of the logits of a chunk.
        sums: copies of the head's gradient while the loss adds those of several chunks.
        streams: copies of the hidden states in the loss: of one chunk, of several chunks.
        reduced: copies of the gradients outside the layers while devices with different tokens add
            them.
        scattered: copies of the whole gradient of a gathered tensor while the devices add and split
            the gradient. They are the most memory if a device has few tokens.
    """

    d: float
    f: float
    q: float
    kv: float
    redone_f: float
    plain_f: float
    plain_redone_f: float
    overlap: float
    rows: float
    weights: float
    experts: float
    tables: float
    softmax: float
    sums: float
    streams: tuple[float, float]
    reduced: float
    scattered: float

    def compute_layer_values(self, values: LayerValues, policy: str, *, adapted: bool) -> float:
        """Return the values of a token in the backward pass of one layer.

        Args:
            values: sizes of the layer.
            policy: `gradient_checkpointing`.
            adapted: whether the layer has adapters, whose products are added to those of the layer.
        """
        keeps = policy in ("", "everything_saveable") or "dots" in policy
        mlp_counts = (
            (self.f, self.redone_f) if values.gated else (self.plain_f, self.plain_redone_f)
        )
        f = mlp_counts[0] + adapted + (0 if keeps else mlp_counts[1] + adapted)
        # Products that are kept save one copy of the stream.
        d = self.d + adapted - ("dots" in policy)
        d += {"before": 0, "after": -2, "both": 2 * keeps, "parallel": -3}[values.norms]
        # Each token has a row for every expert that the token uses.
        rows = values.experts * values.d
        inner = max(f * values.f + 3 * rows, self.rows * rows)
        more = 2 * (values.normed and values.norms != "after")
        attention = (self.q + more) * values.q + (self.kv + more) * values.kv
        return (d * values.d + inner + attention) * (1 + self.overlap * (values.bodies - 1))

    def compute_loss_bytes(
        self,
        *,
        logits: float,
        table: float,
        size: int,
        stored: int,
        stream: float,
        trained: bool,
        is_chunked: bool,
        referred: bool,
        gathered: bool,
        split: bool,
    ) -> float:
        """Return the bytes of the loss, besides what the forward pass keeps.

        Args:
            logits: bytes of the float32 logits of a chunk.
            table: values of the head.
            size, stored: bytes of a value in the computation, and of a stored parameter.
            stream: bytes of the hidden states.
            trained: whether the head has a gradient.
            is_chunked: whether the loss loops over several chunks, and adds their gradients.
            referred: whether the step also computes the logits of a reference.
            gathered: whether the devices gather the head, which otherwise is a parameter.
            split: whether each device has a part of the vocabulary. Then the gradient of the head
                exists only after the logits.
        """
        head, gradient = size * table * gathered, stored * table * trained
        reference_logits = logits if referred else 0
        one = self.softmax * logits + reference_logits + head + self.streams[0] * stream
        one += max(0, gradient - logits) if split else gradient
        if is_chunked:  # the sum of the gradients exists together with the gradient of a chunk
            one += max(0, self.sums - 2) * gradient + (self.streams[1] - self.streams[0]) * stream
        added = logits + reference_logits + head + self.sums * gradient + self.streams[1] * stream
        return max(one, added) if is_chunked else one


#: XLA's CPU backend in float32.
CPU = Buffers(
    d=8,
    f=6,
    q=4,
    kv=4,
    redone_f=3,
    plain_f=3.8,
    plain_redone_f=1.2,
    overlap=0.7,
    rows=27.7,
    weights=0.75,
    experts=2.5,
    tables=2,
    softmax=2,
    sums=3,
    streams=(3, 5),
    reduced=2,
    scattered=2,
)
#: TPUs and GPUs: a rough estimate, chosen with the steps of `tools/bench/plan.py`.
ACCELERATOR = replace(CPU, tables=0.5, softmax=1, sums=1, streams=(8, 8), reduced=1, scattered=0)
