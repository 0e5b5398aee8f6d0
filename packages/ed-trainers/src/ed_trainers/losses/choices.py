"""Batches of several texts of a row, of which a model scores each.

Legend: b rows, n texts of a row, s positions.
"""

from __future__ import annotations

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs

from ed_trainers.batches import HostBatch
from ed_trainers.losses.next_token import further_arrays, sequence_arrays
from ed_trainers.losses.pairs import get_pair_axes

#: Arrays of a text that are no inputs of a model here.
_READ = ("labels", "attention_mask")


def choice_batch(batch: HostBatch, names: tuple[str, ...]) -> Inputs[np.ndarray]:
    """Stack the texts of each row: `input_ids`, `segment_ids`, … int [b, n, s].

    Args:
        batch: `<name>_input_ids`, … for each name.
        names: names of the texts.

    Raises:
        ConfigError: a text is missing.
    """
    choices = []
    for name in names:
        lead = f"{name}_"
        text_arrays = {
            key.removeprefix(lead): v for key, v in batch.items() if key.startswith(lead)
        }
        if "input_ids" not in text_arrays:
            raise ConfigError(
                f"a batch of {len(names)} texts for each row has {names[0]}_input_ids to "
                f"{names[-1]}_input_ids, not only {', '.join(sorted(batch))}"
            )
        arrays = sequence_arrays(text_arrays)
        choices.append({**arrays, **further_arrays(text_arrays, {*arrays, *_READ})})
    stacked = {name: np.stack([part[name] for part in choices], axis=1) for name in choices[0]}
    return Inputs(stacked, dict.fromkeys(stacked, get_pair_axes()))
