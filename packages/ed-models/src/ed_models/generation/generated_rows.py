"""The tokens that `generate` has written so far.

Legend: b rows, t tokens of a row, u tokens of its source, n selected rows, m end tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ed_models.generation.stop_strings import StopStrings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GeneratedRows:
    """The tokens of the rows so far, and the tokens that end a row.

    Attributes:
        ids: [b, t], right-aligned; -1 to the left of a row's first token.
        new: number of generated tokens, [b].
        limit: tokens that a row can get.
        eos: tokens that end a row; -1 for none. [m]
        source: tokens of the encoder, or of the prompt, [b, u]; -1 = padding. None if no option
            reads them.
        stops: strings that end a row.
    """

    ids: Int[Array, "b t"]
    new: Int[Array, " b"]
    limit: Int[Array, ""] | int
    eos: Int[Array, " m"]
    source: Int[Array, "b u"] | None = None
    stops: StopStrings | None = field(default=None, metadata={"static": True})

    def push(self, tokens: Int[Array, " b"]) -> GeneratedRows:
        """Return the rows with one more token; the leftmost column is removed."""
        ids = jnp.concatenate([self.ids[:, 1:], tokens[:, None]], axis=1)
        return replace(self, ids=ids, new=self.new + 1)

    def take(self, rows: Int[Array, " n"]) -> GeneratedRows:
        """Return some of the rows, in this order."""
        source = None if self.source is None else self.source[rows]
        return replace(self, ids=self.ids[rows], new=self.new[rows], source=source)

    def find_ended_rows(self) -> Bool[Array, " b"]:
        """Return which rows end with their latest token."""
        ends = jnp.isin(self.ids[:, -1], self.eos)
        return ends if self.stops is None else ends | self.stops.match_rows(self.ids)

    def get_new_tokens(self) -> Int[Array, "b t"]:
        """Return the generated tokens, and -1 in place of the others."""
        place = jnp.arange(self.ids.shape[1])
        return jnp.where(place >= self.ids.shape[1] - self.new[:, None], self.ids, -1)
