"""`Parts`: makes the parts of one model, so that a family says what differs and nothing else.

Dtypes, precision, initialisation and randomness are decided once, when the model is built; every
linear layer, norm and embedding gets them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ed_layers.embed import Embed
from ed_layers.linear import Axes, Initializer, Linear
from ed_layers.norms import LayerNorm, RMSNorm
from ed_layers.remat import Remat
from ed_layers.stack import Stack

#: What a layer is made by: `(parts, index of the layer) -> layer`.
MakePart = Callable[["Parts", int], nnx.Module]


@dataclass(frozen=True)
class Parts:
    """How the parts of one model are made.

    Attributes:
        config: the model's configuration: sizes, execution fields, `initializer_range`.
        rngs: randomness of the parameters.
        dtype: what activations are computed in.
        param_dtype: what parameters are stored in.
        precision: of matrix products; None = the backend's default.
        norm_of_family: makes the norm that a family has everywhere, from the shape of its weights;
            None = `norm`.
    """

    config: Any  # a family reads its own architecture fields from it
    rngs: nnx.Rngs
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    precision: jax.lax.PrecisionLike = None
    norm_of_family: Callable[..., nnx.Module] | None = None

    @property
    def initializer(self) -> Initializer:
        """Of matrices: normal with the configuration's `initializer_range` (0.02 without one)."""
        return jax.nn.initializers.normal(getattr(self.config, "initializer_range", 0.02))

    def linear(self, inputs: int, outputs: int, *, axes: Axes, bias: bool = False) -> Linear:
        """`y = x @ kernel [+ bias]`; `axes` are the logical axes of the kernel, (in, out)."""
        return Linear(
            inputs,
            outputs,
            axes=axes,
            use_bias=bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            kernel_init=self.initializer,
            rngs=self.rngs,
        )

    def norm(self, features: int, *, eps: float | None = None, **form: Any) -> RMSNorm:
        """Root-mean-square norm; `eps` is the configuration's `rms_norm_eps` by default.

        Args:
            form: `offset`, `scale_first` and `weight` of `RMSNorm`.
        """
        eps = self.config.rms_norm_eps if eps is None else eps
        return RMSNorm(features, eps=eps, dtype=self.dtype, param_dtype=self.param_dtype, **form)

    def own_norm(self, *shape: int) -> nnx.Module:
        """The family's norm, of the stream or of heads."""
        return (self.norm_of_family or self.norm)(*shape)

    def layer_norm(self, *shape: int, eps: float, **form: Any) -> LayerNorm:
        """Layer norm; `form` are `weight`, `bias` and `offset` of `LayerNorm`."""
        return LayerNorm(*shape, eps=eps, dtype=self.dtype, param_dtype=self.param_dtype, **form)

    def embed(self, rows: int, features: int) -> Embed:
        """A table of embeddings [rows, features]."""
        return Embed(
            rows,
            features,
            config=self.config,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            embedding_init=self.initializer,
            rngs=self.rngs,
        )

    def stack(
        self, make: MakePart, num_layers: int, *, kinds: Sequence[Hashable] | None = None
    ) -> Stack:
        """The layers of a decoder, scanned or unrolled as the configuration says.

        Args:
            make: makes layer i: `make(parts, i)`; a class of layers is one.
            num_layers: how many.
            kinds: a value for each layer where they differ; see `Stack`.
        """
        return Stack(
            lambda i, rngs: make(replace(self, rngs=rngs), i),
            num_layers,
            scan=self.config.scan_layers,
            kinds=kinds,
            remat=Remat.resolve(self.config),
            rngs=self.rngs,
        )
