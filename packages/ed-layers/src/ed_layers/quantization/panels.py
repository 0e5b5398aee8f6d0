"""`CodePanels`: a quantized matrix in the order in which the native library reads the codes.

The library multiplies four codes along the inputs by one instruction. Codes of a plain layout are
brought into fours of bytes for every product.

Legend: i in features, o out features, n groups along i, p panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from ed_layers import native
from ed_layers.native.products import LEAST_SIZE, PANEL, Epilogue, QuantizedMatrix
from ed_layers.projections.panels import InPanels
from ed_layers.quantization.formats import FORMATS
from ed_layers.quantization.qarray import QArray, codes_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodePanels(InPanels):
    """A quantized matrix [i, o] whose products round their other operand to 8 bits (`w8a8`,
    `w4a8`).

    Only the other operand of a product has a gradient.

    Attributes:
        codes: int8 [p, i / 4, PANEL, 4], or uint8 [p, i / 8, PANEL, 4] with two codes of four bits
            in a byte; panel k contains the columns from `k * PANEL` on.
        scale: [n, o].
        zero: the code of 0, [n, o]; None = 0.
        dtype: dtype of the original matrix.
    """

    codes: Num[Array, "p _ _ 4"]
    scale: jax.Array
    zero: jax.Array | None = None
    dtype: np.dtype = field(default=np.dtype("float32"), metadata={"static": True})

    @classmethod
    def of(cls, w: QArray) -> CodePanels:
        """Copy a quantized matrix; see `can_be`."""
        codes, scale, zero, _ = codes_of(w)
        fours = codes.reshape(codes.shape[0] // 4, 4, -1, PANEL)
        return cls(jnp.transpose(fours, (2, 0, 3, 1)), scale, zero, w.dtype)

    @staticmethod
    def can_be(w: QArray) -> bool:
        """Return whether panels can contain a matrix, and are faster."""
        fours = 4 * FORMATS[w.format].in_byte  # inputs of four bytes
        whole = w.ndim == 2 and w.shape[1] % PANEL == 0 and w.group_size % fours == 0
        coded = w.format in ("int8", "int4") and w.activations and w.axis == -2
        return whole and coded and w.codes.size >= LEAST_SIZE

    @property
    def shape(self) -> tuple[int, ...]:
        """(i, o)."""
        panels, fours, columns, four = self.codes.shape
        return fours * four * FORMATS[self.format].in_byte, panels * columns

    @property
    def format(self) -> str:
        """The storage format of the codes."""
        return "int4" if self.codes.dtype == jnp.uint8 else "int8"

    @property
    def matrix(self) -> QuantizedMatrix:
        """The arrays as an argument of the native library."""
        form = FORMATS[self.format]
        table = form.level(jnp.arange(16, dtype=jnp.int32)) if form.packed else None
        return QuantizedMatrix(self.codes, self.scale, self.zero, table)

    def plain(self) -> QArray:
        """Return the matrix in the plain layout."""
        codes = jnp.transpose(self.codes, (1, 3, 0, 2)).reshape(-1, self.shape[1])
        return QArray(codes, self.scale, self.zero, self.format, activations=True, dtype=self.dtype)

    def dense(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the matrix as a plain array."""
        return self.plain().dense(dtype)

    @staticmethod
    def products(
        x: Float[Array, "n i"], weights: Sequence[CodePanels], epilogue: Epilogue
    ) -> list[jax.Array]:
        """See `ed_layers.projections.dot.Together`."""
        matrices = [w.matrix for w in weights]
        return native.products.products_of_codes(x, matrices, whole=True, epilogue=epilogue)
