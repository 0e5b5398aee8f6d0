"""The part of a configuration that makes rotary tables and masks."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ed_infra import masks, rope
from ed_infra.caches import ModuleCaches, on_mesh
from ed_infra.config_mesh import MeshMethods
from ed_infra.errors import ConfigError
from ed_infra.rope_sections import sections_of


class PositionMethods(MeshMethods):
    """Methods of `EasyDeLBaseConfig` about positions."""

    @property
    def granted_freq_max_position_embedding(self) -> int:
        """Positions that rotary tables cover."""
        return self._positions("freq_max_position_embeddings")

    @property
    def granted_mask_max_position_embedding(self) -> int:
        """Positions that precomputed masks cover."""
        return self._positions("mask_max_position_embeddings")

    def _positions(self, field: str) -> int:
        value = getattr(self, field) or getattr(self, "max_position_embeddings", None)
        if value is None:
            raise ConfigError(f"neither {field} nor max_position_embeddings is set")
        return value

    def get_basic_inv_frequencies(
        self,
        head_size: int | None = None,
        rotary_dim: int | None = None,
        base: float | None = None,
        partial_rotary_factor: float | None = None,
        *,
        layer_type: str | None = None,
    ) -> ModuleCaches:
        """Return the inverse frequencies of this configuration's rope: float32 [r / 2].

        Args:
            head_size: k; by default `head_dim`.
            rotary_dim: r; by default what `rope_parameters` says, else `head_size`.
            base: base of the frequencies; by default `rope_theta`.
            partial_rotary_factor: r / k, where `rotary_dim` is not given.
            layer_type: whose, where `rope_parameters` has an entry for each layer type.
        """
        settings = self._rope(head_size, rotary_dim, base, partial_rotary_factor, layer_type)
        return on_mesh(jnp.asarray(rope.inv_frequencies(settings)[0]), self.mesh)

    def get_basic_frequencies(
        self,
        head_size: int | None = None,
        rotary_dim: int | None = None,
        base: float | None = None,
        max_position_embeddings: int | None = None,
        *,
        layer_type: str | None = None,
    ) -> ModuleCaches:
        """Return the table of cos and sin, side by side, on the mesh: float32 [positions, r]."""
        length = max_position_embeddings or self.granted_freq_max_position_embedding
        settings = self._rope(head_size, rotary_dim, base, None, layer_type)
        frequencies, scaling = rope.inv_frequencies(settings, seq_len=length)
        table = rope.angles(jnp.arange(length), frequencies, scaling)
        return on_mesh(jnp.concatenate(table, axis=-1), self.mesh)

    def get_basic_rope(
        self,
        dtype: Any = jnp.float32,
        head_size: int | None = None,
        rotary_dim: int | None = None,
        is_neox_style: bool = True,
        base: float | None = None,
        max_position_embeddings: int | None = None,
        *,
        layer_type: str | None = None,
    ) -> rope.RotaryTable:
        """Return a rotary embedding: call it on (query, key, positions), or unpack `sin, cos`.

        With `mrope_section` in `rope_parameters`, positions may have the axes of images and videos
        in front: [a, ..., s].
        """
        length = max_position_embeddings or self.granted_freq_max_position_embedding
        settings = self._rope(head_size, rotary_dim, base, None, layer_type)
        frequencies, scaling = rope.inv_frequencies(settings, seq_len=length)
        axis = sections_of(settings.parameters, len(frequencies))
        return rope.RotaryTable(frequencies, scaling, length, not is_neox_style, dtype, axis)

    def _rope(
        self,
        head_size: int | None,
        rotary_dim: int | None,
        base: float | None,
        partial: float | None,
        layer_type: str | None,
    ) -> rope.RopeSettings:
        settings = rope.settings(self, head_size, layer_type)
        changes: dict[str, Any] = {}
        if base is not None:
            changes["rope_theta"] = base
        if rotary_dim is not None:
            changes["partial_rotary_factor"] = rotary_dim / settings.head_dim
        elif partial is not None:
            changes["partial_rotary_factor"] = partial
        return dataclasses.replace(settings, parameters={**settings.parameters, **changes})

    def get_basic_causal_mask(
        self, max_length: int | None = None, dtype: Any = bool
    ) -> ModuleCaches | Literal[False]:
        """Return the causal mask [1, 1, l, l] on the mesh, nonzero where attention is allowed.

        This is the one place that builds an array of length squared: models never ask for it.

        Args:
            max_length: l; by default `granted_mask_max_position_embedding`.
            dtype: of the result.

        Returns:
            The mask; False where `precompute_masks` is off and no length is given.
        """
        if max_length is None and not self.precompute_masks:
            return False
        length = max_length or self.granted_mask_max_position_embedding
        return on_mesh(jnp.asarray(masks.causal_mask(length), dtype), self.mesh)

    def get_fcm_mask(
        self,
        batch_size: int | None = None,
        seq_length: int | None = None,
        deterministic: bool = False,
        *,
        key: jax.Array | None = None,
        shape: tuple[int, ...] | None = None,
        fcm_ratio: float | None = None,
    ) -> jax.Array | None:
        """Return a forgetful causal mask, True where attention is kept, or None where none is due.

        Two forms: `(batch_size, seq_length, deterministic, key=...)`, [b, 1, s, s] with a ratio
        drawn between `fcm_min_ratio` and `fcm_max_ratio`; and `(key=, shape=, fcm_ratio=)`.

        Raises:
            ConfigError: no key, or no shape.
        """
        if deterministic or (fcm_ratio is None and self.fcm_max_ratio == 0.0):
            return None
        if key is None:
            raise ConfigError("get_fcm_mask draws at random: give key=jax.random.key(...)")
        if shape is None:
            if batch_size is None or seq_length is None:
                raise ConfigError("get_fcm_mask needs batch_size and seq_length, or shape")
            shape = (batch_size, 1, seq_length, seq_length)
        draw, drop = jax.random.split(key)
        ratio: Any = fcm_ratio
        if ratio is None:
            low, high = self.fcm_min_ratio, self.fcm_max_ratio
            ratio = jax.random.uniform(draw, (), minval=low, maxval=high)
        return masks.forgetful_mask(drop, shape, ratio)
