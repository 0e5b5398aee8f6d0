"""Mixers of Mamba, with sizes from the configurations of several families, and their body.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from ed_infra.rope.frequencies import RopeSettings
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from ed_layers.recurrence.mamba import MambaMixer
from ed_layers.recurrence.mamba2 import Mamba2Mixer
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.decoder import Decoder
from ed_models.body.layers import MakeNorm


def mamba_mixer(parts: Parts, *, norm: MakeNorm | None = None) -> MambaMixer:
    """Mamba, by its own fields (Mamba, Falcon-Mamba).

    Args:
        norm: of dt, B and C.
    """
    config = parts.config
    return MambaMixer(
        parts,
        channels=config.intermediate_size,
        states=config.state_size,
        taps=config.conv_kernel,
        rank=int(config.time_step_rank),
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
        norm=norm,
        time_step=(config.time_step_min, config.time_step_max, config.time_step_floor),
    )


def hybrid_mixer(parts: Parts, **form: object) -> Mamba2Mixer:
    """Mamba-2, by the fields of hybrids (Bamba, Falcon-H1, Granite 4).

    Args:
        form: further arguments of `Mamba2Mixer`, which override these fields.
    """
    config = parts.config
    fields = {
        "heads": config.mamba_n_heads,
        "head_dim": config.mamba_d_head,
        "states": config.mamba_d_state,
        "groups": config.mamba_n_groups,
        "taps": config.mamba_d_conv,
        "bias": config.mamba_proj_bias,
        "conv_bias": config.mamba_conv_bias,
        "norm_eps": config.rms_norm_eps,
        "dt_limits": config.time_step_limit,
    }
    return Mamba2Mixer(parts, **{**fields, **form})


class MixerDecoder(Decoder):
    """The body of Mamba: nothing turns, norms have `layer_norm_epsilon`, and the stream is float32
    if `residual_in_fp32` is set."""

    @staticmethod
    def build_norm(parts: Parts) -> Callable[..., nnx.Module]:
        """Makes the family's norm."""
        return partial(parts.norm, eps=parts.config.layer_norm_epsilon)

    def rope_settings(self) -> dict[str, RopeSettings]:
        """None: a recurrence knows the order."""
        return {}

    def enter(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s d"]:
        """The stream's dtype."""
        return x.astype(jnp.float32) if self.config.residual_in_fp32 else x
