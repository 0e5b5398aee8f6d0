"""Prompts of embeddings instead of token ids (`prompt_embeds`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from ed_infra.errors import ConfigError
from ed_models.body.decoder import Decoder
from ed_models.modalities.items import EncoderItems, ItemArrays, PlacedItem
from ed_models.protocol import LanguageModel
from jaxtyping import Float

from ed_esurge.core.commands import EncoderInput
from ed_esurge.sampling import SamplingParams

#: Name of the array of an item.
_EMBEDS = "inputs_embeds"
#: Token id of the positions of a prompt of embeddings. The model does not read this token.
_PLACEHOLDER = 0
#: Most embeddings of one item. A prompt has several items, so chunks of a long prompt fit the table
#: of encoder outputs.
_ROWS = 64
#: Largest absolute value of an embedding, the largest number of float16. Larger values overflow in
#: the norms of a model.
MOST = 65504.0


class EmbeddedPrompts(EncoderItems):
    """Embeddings `inputs_embeds` [n, d] as the items of a model's encoder; see `EncoderItems`.

    The scheduler thus treats a prompt of embeddings as a prompt of images: chunks, the prefix cache
    and preemption need no code for embeddings.

    Args:
        model: a causal language model.
        max_model_len: maximum number of tokens of a sequence.
        per_step: maximum number of tokens of a step.

    Raises:
        ConfigError: the model does not accept embeddings, or has an encoder.
    """

    names = (_EMBEDS,)

    def __init__(self, model: LanguageModel, max_model_len: int, per_step: int) -> None:
        body = getattr(model, "model", None)
        reads_ids = getattr(model.config, "hidden_size_per_layer_input", None)
        if not isinstance(body, Decoder) or reads_ids:
            raise ConfigError(
                f"enable_prompt_embeds requires a causal language model that reads only the "
                f"embeddings of its tokens, and this is a {type(model).__name__}: omit the option"
            )
        features = body.features  # the body is not kept: its weights may be replaced
        super().__init__(lambda: (min(_ROWS, per_step), features))
        self._max_model_len = max_model_len

    def examples(self) -> list[ItemArrays]:
        """See `EncoderItems.examples`."""
        return [{_EMBEDS: np.zeros((self.longest, self.features), np.float32)}]

    def pad_item(self, arrays: ItemArrays) -> ItemArrays:
        """See `EncoderItems.pad_item`."""
        embeds = np.asarray(arrays[_EMBEDS], np.float32)
        return {_EMBEDS: np.pad(embeds, ((0, self.longest - len(embeds)), (0, 0)))}

    def check(self, item: PlacedItem) -> str | None:
        """See `EncoderItems.check`."""
        shape = np.shape(item.arrays[_EMBEDS])
        if shape == (item.length, self.features):
            return None
        return (
            f"{_EMBEDS} has shape {list(shape)}, but the item has {item.length} placeholder "
            f"tokens: pass [{item.length}, {self.features}], see eSurge.embedded_prompt"
        )

    def split_items(self, row: ItemArrays) -> Iterator[tuple[ItemArrays, int]]:
        """See `EncoderItems.split_items`."""
        for start in range(0, len(row[_EMBEDS]), self.longest):
            part = row[_EMBEDS][start : start + self.longest]
            yield {_EMBEDS: part}, len(part)

    def prompt(
        self, embeds: Float[np.ndarray, "n d"]
    ) -> tuple[list[int], tuple[EncoderInput, ...]]:
        """Return the token ids and the items of a prompt.

        Args:
            embeds: one embedding for each position of the prompt, as the model's token embedding
                returns them: `inputs_embeds` of Hugging Face.

        Raises:
            ConfigError: the shape or the type is wrong, or a value is not finite or too large.
        """
        expected_shape = f"[n, {self.features}] with n of 1 to {self._max_model_len}"
        if embeds.ndim != 2 or embeds.shape[1] != self.features or not len(embeds):
            raise ConfigError(
                f"the embeddings have shape {list(embeds.shape)}, and this model reads "
                f"{expected_shape}: "
                "send one embedding for each token of the prompt"
            )
        if len(embeds) > self._max_model_len:
            raise ConfigError(
                f"the prompt has {len(embeds)} embeddings, and max_model_len is "
                f"{self._max_model_len}: send a shorter prompt"
            )
        if embeds.dtype.name not in ("float32", "float16", "bfloat16"):
            raise ConfigError(
                f"the embeddings have the type {embeds.dtype.name}: send float32, float16 or "
                "bfloat16"
            )
        embeds = embeds.astype(np.float32)
        largest = np.abs(embeds).max()
        if not largest <= MOST:  # true for NaN, too
            raise ConfigError(
                f"the largest absolute value of the embeddings is {largest}, and the limit is "
                f"{MOST:g}: send the output of the model's token embedding"
            )
        items, start = [], 0
        for arrays, length in self.split_items({_EMBEDS: embeds}):
            items.append(EncoderInput.of(arrays, start, length))
            start += length
        return [_PLACEHOLDER] * len(embeds), tuple(items)


def check_params_of_embeds(params: SamplingParams) -> None:
    """Check that no sampling option reads the token ids of the prompt, which embeddings lack.

    Raises:
        ConfigError: an option reads them.
    """
    defaults = SamplingParams()
    for name in ("repetition_penalty", "dry_multiplier", "prompt_logprobs"):
        value = getattr(params, name)
        if value != getattr(defaults, name):
            raise ConfigError(
                f"{name}={value} reads the token ids of the prompt, and a prompt of embeddings has "
                "none: omit the option, or send token ids"
            )
