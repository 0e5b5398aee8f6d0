"""Numbers of the rows of a step: options of a request as one int32 array, floats as their bits."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Numbers of a row that change with every step. The numbers of its slot follow.
# `state_sources` and `state_targets` are the slots of the recurrent state before and after the
# step. `proposals` is the proposed token that a row verifies, or one of the two numbers below.
OF_ROW = ("kv_lens", "logits_at", "state_sources", "state_targets", "proposals")
# A row that verifies no proposed token, and a row whose token is dropped in any case.
NO_PROPOSAL, DROPPED = -1, -2
OF_SEQUENCE = ("state_slots", "prompt_lens", "adapter_ids")
# Rows that do not sample use the sampling numbers of the empty slot.
OF_SAMPLING = (
    "slot",
    "seed",
    "top_k",
    "num_logprobs",
    "processed",
    "mirostat",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "mirostat_tau",
    "mirostat_eta",
)
OF_STEP = (*OF_ROW, *OF_SEQUENCE, *OF_SAMPLING)
# Further numbers of a row with filters of `ed_esurge.runner.filters`.
OF_FILTERS = ("typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold")
FLOAT_FIELDS = frozenset((*OF_SAMPLING[OF_SAMPLING.index("temperature") :], *OF_FILTERS))


class NumberTable:
    """Numbers by name and slot. Initially all numbers are 0.

    Args:
        names: names of the rows.
        slots: number of columns.

    Attributes:
        numbers: int32 [names, slots].
    """

    def __init__(self, names: Sequence[str], slots: int) -> None:
        self.numbers = np.zeros((len(names), slots), np.int32)
        self._rows = {name: row for row, name in enumerate(names)}

    def set(self, at: int, /, **values: float) -> None:
        """Write numbers of the slot `at`."""
        for name, value in values.items():
            bits = np.float32(value).view(np.int32) if name in FLOAT_FIELDS else np.int32(value)
            self.numbers[self._rows[name], at] = bits


def split_columns(numbers: jax.Array, names: Sequence[str]) -> dict[str, jax.Array]:
    """Return the rows of `numbers` [names, n] by name, on the device."""
    return {
        name: jax.lax.bitcast_convert_type(line, jnp.float32) if name in FLOAT_FIELDS else line
        for name, line in zip(names, numbers, strict=True)
    }
