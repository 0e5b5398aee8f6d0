"""Batches of recordings and their transcripts, for encoder-decoders.

Legend: b rows, t positions of the decoder.
"""

from __future__ import annotations

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_models.protocol import LanguageModel

from ed_trainers.batches import HostBatch
from ed_trainers.losses.next_token import decoder_arrays
from ed_trainers.placement import TOKENS


def reads_sound(model: LanguageModel) -> bool:
    """Return whether a model reads recordings instead of tokens.

    An audio-language model reads recordings as items of its prompts, so it also reads tokens.
    """
    names = {*model.input_names}
    return "input_ids" not in names and bool({"input_features", "input_values"} & names)


def speech_batch(batch: HostBatch, model: LanguageModel) -> Inputs[np.ndarray]:
    """Return a batch of recordings with targets and weights of their transcripts.

    Args:
        batch: the array that the model reads, `input_features` or `input_values`, optionally
            `attention_mask` of the samples, and the arrays of the decoder as for
            `next_token_batch`: `labels` int [b, t], ….
        model: the trained model.

    Raises:
        ConfigError: the recordings or the labels are missing, or shapes differ.
    """
    name = model.input_names[0]
    if name not in batch:
        raise ConfigError(
            f"a batch of {type(model).__name__} has {name}, not only {', '.join(sorted(batch))}"
        )
    sound: dict[str, np.ndarray] = {name: np.asarray(batch[name], np.float32)}
    if "attention_mask" in model.input_names and "attention_mask" in batch:
        sound["attention_mask"] = np.asarray(batch["attention_mask"], np.int32)
    decoder_inputs = decoder_arrays(batch, model)
    return Inputs({**sound, **decoder_inputs}, {"targets": TOKENS, "weights": TOKENS})
