"""End tokens of a model that is trained on chats."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from ed_data.tokens.chats import end_of_answer
from ed_models.generation.options import SPECIAL, special_token
from ed_models.generation.values import validate_token_ids

if TYPE_CHECKING:
    from ed_models.tasks.causal_lm import CausalLM
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("ed_elarge")


def stop_after_answers(model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the token that ends an answer of the chat template to the model's end tokens.

    A model that is trained on chats generates this token at the end of an answer. The token often
    differs from the end-of-text token of the checkpoint: Qwen2.5 has `<|endoftext|>`, and its
    template ends an answer with `<|im_end|>`. `generate`, the engine and `generation_config.json`
    read the end tokens from the model.

    Args:
        model: The model; changed in place.
        tokenizer: The model's tokenizer, with or without a chat template.
    """
    end = end_of_answer(tokenizer)
    stored = json.loads(model.generation_json) if model.generation_json else {}
    special_tokens = {name: special_token(model.config, name) for name in SPECIAL}
    defaults = {name: token for name, token in special_tokens.items() if token is not None}
    ends = validate_token_ids(
        "eos_token_id", stored.get("eos_token_id", defaults.get("eos_token_id"))
    )
    if end is None or end in ends or end >= model.config.get_text_config().vocab_size:
        return
    settings = {**(stored or defaults), "eos_token_id": [*ends, end]}
    model.generation_json = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    log.info(
        "%r ends an answer of the chat template: the token ends completions of this model",
        tokenizer.convert_ids_to_tokens(end),
    )
