"""Times of the tokens of a window: dynamic time warping over the cross-attention of Whisper.

The method is that of OpenAI's Whisper, with the steps of `transformers`: the attention weights of
the checkpoint's `alignment_heads` are normalized over the tokens, smoothed by a median filter and
averaged. The cheapest monotonic path through the negated weights gives the time of each token.

Legend: n tokens, s positions of the decoder, t positions of the encoder, d hidden, a heads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded
from ed_layers.attention.blocks.cross_attention import CrossAttention
from flax import nnx
from jaxtyping import Float, Int

from ed_models.body.context import layer_context
from ed_models.generation.prompts import bucket, right_aligned

if TYPE_CHECKING:
    from ed_models.base.module import EasyDeLBaseModule

#: Seconds of a position of the encoder.
SECONDS = 0.02


class _Recorder:
    """A cross-attention that also keeps its weights."""

    def __init__(self, attention: CrossAttention):
        self.attention = attention
        self.weights: jax.Array | None = None

    def __call__(self, x: jax.Array, ctx: Any, cache: None, layer: int) -> tuple[jax.Array, None]:
        attention = self.attention
        q = attention.q_proj(x, ctx).reshape(*x.shape[:2], -1, attention.head_dim)
        keys, _ = attention.keys_values(ctx.encoded, ctx)
        scale = attention.scores.scale or attention.head_dim**-0.5
        scores = jnp.einsum("bshk,bthk->bhst", q, keys).astype(jnp.float32) * scale
        self.weights = jax.nn.softmax(scores)
        return attention(x, ctx, cache, layer)


class TokenAligner:
    """Times of tokens by the cross-attention of a Whisper model.

    Args:
        model: the model.
        heads: layer and head of each alignment head.
    """

    def __init__(self, model: Any, heads: Sequence[Sequence[int]]):
        self.model, self.heads = model, [tuple(head) for head in heads]
        self.positions: int = model.config.max_target_positions
        self.filter_width: int = model.config.median_filter_width

    @classmethod
    def of(cls, model: EasyDeLBaseModule) -> TokenAligner | None:
        """Return the aligner of a checkpoint; None if it stores no `alignment_heads`."""
        stored = json.loads(model.generation_json) if model.generation_json else {}
        heads = stored.get("alignment_heads")
        return None if heads is None else cls(model, heads)

    def check(self) -> None:
        """Check the alignment heads.

        Raises:
            ConfigError: there are no heads, or the model lacks one of them.
        """
        shape = self.model.config.decoder_layers, self.model.config.decoder_attention_heads
        wrong = [list(head) for head in self.heads if not _within(head, shape)]
        if wrong or not self.heads:
            raise ConfigError(
                f"word_timestamps: alignment_heads of generation_config.json has "
                f"{wrong[0] if wrong else 'no heads'}; the decoder has {shape[0]} layers with "
                f"{shape[1]} heads: copy the heads of the checkpoint that was fine-tuned"
            )

    @cached_property
    def _program(self) -> tuple[Any, Any]:
        graphdef, state = nnx.split(self.model)

        @jax.jit
        def weights(
            state: nnx.State, outputs: jax.Array, tokens: jax.Array, valid: jax.Array
        ) -> Any:
            body = nnx.merge(graphdef, state).model
            encoded = Encoded(outputs, jnp.ones(outputs.shape[:2], jnp.int32))
            masks: dict[str, Any] = {"attention_mask": valid}
            hidden = body(tokens, encoded=encoded, output_hidden_states=True, **masks).hidden_states
            ctx, _ = layer_context(
                body.decoder_config, (1, tokens.shape[1]), ropes=body.ropes, **masks
            )
            ctx = replace(ctx, encoded=encoded)
            layer_weights = {}
            for layer in sorted({layer for layer, _ in self.heads}):
                module = nnx.merge(*nnx.split(body.decoder.layers.layer(layer)))
                recorder = _Recorder(module.cross_attn)
                module.cross_attn = recorder
                module(hidden[layer], ctx, None, layer)
                layer_weights[layer] = recorder.weights
            return jnp.stack([layer_weights[layer][0, head] for layer, head in self.heads])

        return state, weights

    def weights(
        self, outputs: jax.Array, prefix: Sequence[int], tokens: Sequence[int]
    ) -> Float[np.ndarray, "a n t"]:
        """Return the weights of the alignment heads for the tokens after a prefix.

        Args:
            outputs: encoder output of the window, [1, t, d].
            prefix: tokens before the text.
            tokens: the text, with its times.
        """
        ids = np.asarray([[*prefix, *tokens]], np.int32)
        width = min(bucket(ids.shape[1]), self.positions)
        state, program = self._program
        aligned = right_aligned(ids, np.ones(ids.shape, bool), width)
        return np.asarray(program(state, outputs, *aligned))[:, width - len(tokens) :]

    def times(
        self,
        outputs: jax.Array,
        prefix: Sequence[int],
        tokens: Sequence[int],
        ended: bool,
        count: int,
    ) -> Float[np.ndarray, " n"]:
        """Return the time of each token in seconds after the begin of the window.

        Args:
            outputs, prefix, tokens: see `weights`.
            ended: whether the end token follows the tokens. Otherwise the last token has the time
                of the token before.
            count: encoder positions with sound.
        """
        read = tokens if ended else tokens[:-1]
        if not len(read) or count < 1:
            return np.zeros(len(tokens))
        weights = self.weights(outputs, prefix, read)[:, :, :count]
        spread = weights.std(-2, keepdims=True)
        # A position with equal weights of all tokens decides nothing. `transformers` divides by 0.
        spread = np.where(spread > 0, spread, np.inf)
        normal = (weights - weights.mean(-2, keepdims=True)) / spread
        matrix = median_filter(normal, self.filter_width).mean(axis=0)
        text, places = find_warping_path(-matrix.astype(np.float64))
        token_times = places[np.diff(text, prepend=-1) > 0] * SECONDS
        return token_times if ended else np.append(token_times, token_times[-1])


def _within(head: Sequence[int], shape: tuple[int, int]) -> bool:
    pairs = zip(head, shape, strict=False)
    return len(head) == 2 and all(0 <= number < size for number, size in pairs)


def median_filter(values: Float[np.ndarray, "*dims t"], width: int) -> Float[np.ndarray, "*dims t"]:
    """Return the medians of windows of odd width along the last axis, with reflected edges."""
    margin = width // 2
    if values.shape[-1] <= margin:
        return values
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(margin, margin)], mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    return np.sort(windows, axis=-1)[..., margin]


def find_warping_path(
    matrix: Float[np.ndarray, "n t"],
) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"]]:
    """Return the cheapest monotonic path from the first to the last element of a matrix of costs.

    The costs of an antidiagonal depend on earlier antidiagonals only, so each is computed at once.

    Returns:
        row and column of each step p of the path.
    """
    n, t = matrix.shape
    cost = np.full((n + 1, t + 1), np.inf, np.float32)
    step = np.full((n + 1, t + 1), -1, np.int8)
    cost[0, 0] = 0
    for number in range(2, n + t + 1):
        i = np.arange(max(1, number - t), min(n, number - 1) + 1)
        j = number - i
        diagonal, down, right = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        kind = np.where((down < diagonal) & (down < right), 1, 2)
        kind = np.where((diagonal < down) & (diagonal < right), 0, kind)
        cost[i, j] = matrix[i - 1, j - 1] + np.choose(kind, (diagonal, down, right))
        step[i, j] = kind
    step[0, :], step[:, 0] = 2, 1
    rows, columns, i, j = [], [], n, t
    while i > 0 or j > 0:
        rows.append(i - 1)
        columns.append(j - 1)
        kind = step[i, j]
        i, j = i - (kind != 2), j - (kind != 1)
    return np.array(rows[::-1]), np.array(columns[::-1])
