"""Pooling of the hidden states of a row into one vector, as in sentence-transformers.

An embedding checkpoint has the files of the model, `modules.json` (a list of modules) and
`1_Pooling/config.json` (https://sbert.net/docs/package_reference/sentence_transformer).

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from ed_infra.errors import CheckpointError, unknown_name
from jaxtyping import Array, Float, Int

from ed_models.checkpoints.checks import MODULES_NAME

PoolingMode = Literal["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
#: Alias -> mode.
POOLING_ALIASES: dict[str, PoolingMode] = {"last": "lasttoken", "weighted": "weightedmean"}
# Mode -> key of 1_Pooling/config.json.
_KEYS: dict[PoolingMode, str] = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@dataclass(frozen=True)
class Pooling:
    """A pooling method.

    Attributes:
        mode: `cls`: the first token; `lasttoken`: the last token; `max` and `mean` over the tokens;
            `mean_sqrt_len_tokens`: the sum divided by the square root of the number of tokens;
            `weightedmean`: the mean in which token n of a row has weight n.
        normalize: whether vectors are normalized to length one.
    """

    mode: PoolingMode = "mean"
    normalize: bool = False

    @classmethod
    def of(cls, mode: str = "mean", normalize: bool = False) -> Pooling:
        """Create a pooling method from a mode or its alias.

        Raises:
            ConfigError: the mode is unknown.
        """
        canonical = POOLING_ALIASES.get(mode, mode)
        if canonical not in get_args(PoolingMode):
            raise unknown_name("pooling mode", mode, [*get_args(PoolingMode), *POOLING_ALIASES])
        return cls(canonical, bool(normalize))  # type: ignore[arg-type]

    def __call__(
        self, hidden: Float[Array, "b s d"], mask: Int[Array, "b s"] | None = None
    ) -> Float[Array, "b d"]:
        """Pool the tokens of each row in float32; `mask` is nonzero for tokens."""
        b, s, _ = hidden.shape
        real = jnp.ones((b, s), bool) if mask is None else jnp.asarray(mask) != 0
        return self._normalized(self._pooled(hidden.astype(jnp.float32), real))

    def of_segments(
        self, hidden: Float[Array, "b s d"], segment_ids: Int[Array, "b s"], segments: int
    ) -> Float[Array, "b n d"]:
        """Pool the tokens of each segment 1 to n (`segments`) in float32; zeros if it is missing.

        Padding is segment 0. The tokens of a segment are contiguous.
        """
        before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
        after = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
        first, last = segment_ids != before, segment_ids != after

        def summed(values: Array) -> Array:
            def of_row(row: Array, ids: Array) -> Array:
                return jax.ops.segment_sum(row, ids, num_segments=segments + 1)[1:]

            return jax.vmap(of_row)(values.astype(jnp.float32), segment_ids)

        hidden = hidden.astype(jnp.float32)
        if self.mode == "max":

            def largest(row: Array, ids: Array) -> Array:
                return jax.ops.segment_max(row, ids, num_segments=segments + 1)[1:]

            found = jax.vmap(largest)(hidden, segment_ids)
            return self._normalized(jnp.where(jnp.isfinite(found), found, 0.0))
        weights = jnp.ones_like(segment_ids)
        if self.mode in ("cls", "lasttoken"):
            weights = first if self.mode == "cls" else last
        elif self.mode == "weightedmean":
            index = jnp.arange(segment_ids.shape[1])
            start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
            weights = index - start + 1
        total, count = summed(hidden * weights[..., None]), summed(weights)[..., None]
        count = jnp.maximum(count, 1e-9)
        root = self.mode == "mean_sqrt_len_tokens"
        return self._normalized(total / (jnp.sqrt(count) if root else count))

    def _normalized(self, vectors: Array) -> Array:
        if not self.normalize:
            return vectors
        # The gradient of `norm` at 0 (a missing segment) is NaN.
        squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
        return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))

    def _pooled(self, hidden: Array, real: Array) -> Array:
        b, s, _ = hidden.shape
        if self.mode == "cls":
            return hidden[jnp.arange(b), jnp.argmax(real, axis=1)]
        if self.mode == "lasttoken":
            return hidden[jnp.arange(b), s - 1 - jnp.argmax(real[:, ::-1], axis=1)]
        if self.mode == "max":
            return jnp.max(jnp.where(real[..., None], hidden, -jnp.inf), axis=1)
        weights = real.astype(jnp.float32)
        if self.mode == "weightedmean":
            weights = weights * jnp.cumsum(weights, axis=1)
        total = jnp.einsum("bs,bsd->bd", weights, hidden)
        count = jnp.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
        return total / (jnp.sqrt(count) if self.mode == "mean_sqrt_len_tokens" else count)

    @classmethod
    def read(cls, directory: Path) -> Pooling | None:
        """Read the pooling method of a checkpoint; return None without `modules.json`.

        Raises:
            CheckpointError: the files are damaged or list unsupported modules.
        """
        path = directory / MODULES_NAME
        if not path.is_file():
            return None
        try:
            modules = [(m["type"].rpartition(".")[2], m["path"]) for m in _json(path)]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no list of modules ({error!r})") from error
        kinds = [kind for kind, _ in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise CheckpointError(
                f"{path} lists the modules {', '.join(kinds)}; an embedding model here is a "
                "Transformer, a Pooling and, if vectors are normalized, a Normalize"
            )
        return cls(_mode(directory / modules[1][1] / "config.json"), "Normalize" in kinds)

    def write(self, directory: Path, features: int) -> None:
        """Write the pooling files of a checkpoint; `features` is d."""
        kinds = ["", "1_Pooling", *(["2_Normalize"] if self.normalize else [])]
        modules = [
            {
                "idx": i,
                "name": str(i),
                "path": path,
                "type": f"sentence_transformers.models.{path.partition('_')[2] or 'Transformer'}",
            }
            for i, path in enumerate(kinds)
        ]
        settings: dict[str, Any] = {"word_embedding_dimension": features}
        settings |= {key: mode == self.mode for mode, key in _KEYS.items()}
        settings["include_prompt"] = True
        (directory / kinds[1]).mkdir(exist_ok=True)
        for path, value in (
            (directory / MODULES_NAME, modules),
            (directory / kinds[1] / "config.json", settings),
        ):
            path.write_text(json.dumps(value, indent=2) + "\n")


def _mode(path: Path) -> PoolingMode:
    settings = _json(path)
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} is no JSON object")
    named = settings.get("pooling_mode")  # newer files have one field
    wanted = [named] if isinstance(named, str) else [m for m, k in _KEYS.items() if settings.get(k)]
    chosen: list[PoolingMode] = [mode for mode in _KEYS if mode in wanted]
    if len(wanted) != 1 or len(chosen) != 1:
        raise CheckpointError(
            f"{path} has the pooling modes {wanted}; one of {', '.join(_KEYS)} is supported"
        )
    return chosen[0]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
