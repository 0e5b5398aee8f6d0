"""A tiny model in the folder of the quickstart's model, as a starting point for every page."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random two-layer Llama and a trained tokenizer in Hugging Face layout."""
    import jax.numpy as jnp
    from ed_data.tokens.bpe import train_bpe
    from ed_models.auto import AutoEasyDeLModelForCausalLM
    from ed_models.families.llama import LlamaConfig

    folder = tmp_path_factory.mktemp("quickstart") / "model"
    tokenizer = train_bpe(pydoc_data.topics.topics.values(), vocab_size=512)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = AutoEasyDeLModelForCausalLM.from_config(
        config, dtype=jnp.float32, param_dtype=jnp.float32, seed=0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
