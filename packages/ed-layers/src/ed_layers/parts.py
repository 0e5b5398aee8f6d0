"""`Parts`: creates the layers of one model, so that a family states only what differs.

Dtypes, precision, initialization and randomness are set once per model. `Parts` passes them to
every linear layer, norm and embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.sharding.axes import LogicalAxes
from flax import nnx
from jax.typing import DTypeLike

from ed_layers.depth.remat import Remat
from ed_layers.depth.stack import Stack
from ed_layers.norms import LayerNorm, RMSNorm
from ed_layers.projections.embed import Embed
from ed_layers.projections.linear import ExpertLinear, Initializer, Linear

#: Creates a layer: `(parts, index of the layer) -> layer`.
MakePart = Callable[["Parts", int], nnx.Module]


@dataclass(frozen=True)
class Parts:
    """The settings that all layers of one model share.

    Attributes:
        config: the model's configuration: sizes, execution fields, `initializer_range`.
        rngs: randomness of the parameters.
        dtype: dtype of activations.
        param_dtype: dtype of stored parameters.
        precision: precision of matrix products; None = the backend's default.
        norm_of_family: creates the norm that a family uses everywhere from the shape of its
            weights; None = `norm`.
    """

    config: Any  # a family reads its own architecture fields from it
    rngs: nnx.Rngs
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    precision: jax.lax.PrecisionLike = None
    norm_of_family: Callable[..., nnx.Module] | None = None

    @property
    def initializer(self) -> Initializer:
        """Initializer of matrices: normal with `initializer_range` (0.02 if the field is unset)."""
        return jax.nn.initializers.normal(getattr(self.config, "initializer_range", 0.02))

    def linear(self, inputs: int, outputs: int, *, axes: LogicalAxes, bias: bool = False) -> Linear:
        """Create `y = x @ kernel [+ bias]`; `axes`: the logical axes of the kernel, (in, out)."""
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

    def expert_linear(
        self, experts: int, inputs: int, outputs: int, *, axes: LogicalAxes, bias: bool = False
    ) -> ExpertLinear:
        """Create the linear layers of all experts; `axes`: the logical axes of one kernel."""
        return ExpertLinear(
            experts,
            inputs,
            outputs,
            axes=axes,
            use_bias=bias,
            param_dtype=self.param_dtype,
            kernel_init=self.initializer,
            rngs=self.rngs,
        )

    def norm(self, features: int, *, eps: float | None = None, **form: Any) -> RMSNorm:
        """Create a root-mean-square norm; the default of `eps` is the `rms_norm_eps` field.

        Args:
            form: `offset`, `scale_first` and `weight` of `RMSNorm`.
        """
        form["eps"] = self.config.rms_norm_eps if eps is None else eps
        return RMSNorm(features, dtype=self.dtype, param_dtype=self.param_dtype, **form)

    def own_norm(self, *shape: int) -> nnx.Module:
        """Create the family's norm for hidden states or heads."""
        return (self.norm_of_family or self.norm)(*shape)

    def layer_norm(self, *shape: int, eps: float, **form: Any) -> LayerNorm:
        """Create a layer norm; `form` contains `weight`, `bias` and `offset` of `LayerNorm`."""
        return LayerNorm(*shape, eps=eps, dtype=self.dtype, param_dtype=self.param_dtype, **form)

    def embed(self, rows: int, features: int, *, padding: int | None = None) -> Embed:
        """Create a table of embeddings [rows, features]; `padding`: see `Embed`."""
        return Embed(
            rows,
            features,
            config=self.config,
            padding=padding,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            embedding_init=self.initializer,
            rngs=self.rngs,
        )

    def table(self, *shape: int, axes: LogicalAxes) -> nnx.Param[jax.Array]:
        """Create a trained table, such as that of relative position buckets."""
        values = self.initializer(self.rngs.params(), shape, self.param_dtype)
        return nnx.Param(values, axes=axes)

    def stack(
        self, make: MakePart, num_layers: int, *, kinds: Sequence[Hashable] | None = None
    ) -> Stack:
        """Create the layers of a decoder, scanned or unrolled according to the configuration.

        Args:
            make: creates layer i: `make(parts, i)`; usually the class of the layer.
            num_layers: number of layers.
            kinds: one value per layer if the layers differ; see `Stack`.
        """
        return Stack(
            lambda i, rngs: make(replace(self, rngs=rngs), i),
            num_layers,
            scan=self.config.scan_layers,
            kinds=kinds,
            remat=Remat.resolve(self.config),
            rngs=self.rngs,
        )
