"""The files of a run that other tools load."""

from __future__ import annotations

import json

import pytest
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import SFTArguments, SFTTrainer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def tokenizer(**given):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **given)


@pytest.mark.nightly
@pytest.mark.parametrize(("given", "length"), [({}, 48), ({"model_max_length": 20}, 20)])
def test_a_saved_tokenizer_knows_how_much_the_model_takes(tmp_path, given, length):
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=48,
    )
    own = tokenizer(**given)
    before = own.model_max_length
    arguments = SFTArguments(save_directory=str(tmp_path))
    model = LlamaForCausalLM.create(config)
    SFTTrainer(arguments, model=model, processing_class=own).save_model(tmp_path / "model")
    saved = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    assert saved["model_max_length"] == length
    assert own.model_max_length == before  # the user's own is left alone
