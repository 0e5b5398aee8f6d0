"""What a layer is told about the batch besides its activations.

Legend: b batch, s query length, k head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import jax
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.cache.ragged import RaggedBatch

Mode = Literal["train", "prefill", "decode"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["position_ids", "rope", "mask_info", "ragged", "adapter_ids", "key"],
    meta_fields=["mode"],
)
@dataclass(frozen=True)
class Ctx:
    """Everything that all layers share in one forward pass; a pytree, closed over by the scan.

    Attributes:
        position_ids: rotary positions, [b, s].
        rope: `(cos, sin)`, each float32 [b, s, k/2], computed once for all layers.
        mask_info: who may attend to whom; None when `ragged` says it.
        ragged: the flat batch of a serving step; None otherwise.
        adapter_ids: LoRA adapter of each token, [b, s]; None where no adapter is served.
        key: dropout key; None means deterministic.
        mode: "train" (layers may be recomputed in a backward pass), "prefill" or "decode" (static).
    """

    position_ids: Int[Array, "b s"]
    rope: tuple[Float[Array, "b s half"], Float[Array, "b s half"]]
    mask_info: MaskInfo | None = None
    ragged: RaggedBatch | None = None
    adapter_ids: Int[Array, "b s"] | None = None
    key: jax.Array | None = None
    mode: Mode = field(default="train")

    def at_layer(self, layer: int | Int[Array, ""]) -> Ctx:
        """Give the layer its own dropout key: the same one scanned and unrolled."""
        if self.key is None:
            return self
        return replace(self, key=jax.random.fold_in(self.key, layer))
