"""The MTP layer against torch: the published definition around a layer of transformers.

transformers has no MTP layer. The reference joins its body with one layer and the two norms and the
projection that vLLM's `qwen3_next_mtp` and section 2.2 of arXiv:2412.19437 define.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.testing import require_torch, tiny_llama
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.body.mtp import get_layer_config
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.families.qwen3_5_text import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from flax import nnx
from safetensors.numpy import load_file, save_file

ONE = (1, 1, 1, 1, 1)
IDS = np.random.default_rng(0).integers(3, 90, (2, 11)).astype(np.int32)
QWEN = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def create(family: str, **fields: Any) -> Any:
    """Return a random model with an MTP layer."""
    fields = {"sharding_axis_dims": ONE, "mtp_head": "new", **fields}
    if family == "llama":
        known = {**tiny_llama(vocab_size=96, initializer_range=0.2), **fields}
        known.pop("model_type")
        model: Any = LlamaForCausalLM.create(LlamaConfig(**known), seed=1)
    else:
        model = Qwen3_5ForCausalLM.create(Qwen3_5TextConfig(**{**QWEN, **fields}), seed=1)
    rng = np.random.default_rng(2)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):  # initially neutral
        weight = getattr(model.mtp, name).weight
        weight.set_value(weight[...] + rng.normal(0, 0.3, weight.shape).astype(np.float32))
    return model


def apply_layer(model: Any, tokens: np.ndarray, hidden: jax.Array) -> jax.Array:
    """Return the hidden states of the layer for the tokens after each position."""
    embeds = model.model.embed(jnp.asarray(tokens), None)
    return model.mtp(inputs_embeds=embeds, hidden=hidden).last_hidden_state


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_layer_equals_the_published_definition(family: str, tmp_path: Path) -> None:
    torch = require_torch()
    import transformers

    model = create(family)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = {n.removeprefix("mtp."): torch.tensor(x) for n, x in tensors.items() if "mtp." in n}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    config = theirs.config.get_text_config()
    settings = {**config.to_dict(), "num_hidden_layers": 1}
    if family == "qwen3_5_text":
        settings["layer_types"] = ["full_attention"]
    body = type(theirs.model)(type(config)(**settings))
    missing, unexpected = body.load_state_dict(stored, strict=False)
    assert set(missing) == {"embed_tokens.weight"}
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
    assert set(unexpected) == {"fc.weight", *(f"{name}.weight" for name in names)}
    norms = [type(body.norm)(config.hidden_size, eps=config.rms_norm_eps) for _ in names]
    for norm, name in zip(norms, names, strict=True):
        norm.load_state_dict({"weight": stored[f"{name}.weight"]})

    def apply_reference(following: Any, hidden: Any) -> Any:
        pair = norms[0](theirs.model.embed_tokens(following)), norms[1](hidden)
        x = torch.cat(pair, dim=-1) @ stored["fc.weight"].T
        return body(inputs_embeds=x).last_hidden_state

    ids = torch.tensor(IDS).long()
    with torch.no_grad():
        right = apply_reference(ids[:, 1:], theirs.model(ids).last_hidden_state[:, :-1])
        further = apply_reference(ids[:, 2:], right[:, :-1])
        logits = theirs.lm_head(further).numpy()
    hidden = model(jnp.asarray(IDS), logits_at="none").last_hidden_state
    ours = apply_layer(model, IDS[:, 1:], hidden[:, :-1])
    np.testing.assert_allclose(ours, right.numpy(), atol=3e-4)
    ours = apply_layer(model, IDS[:, 2:], ours[:, :-1])
    np.testing.assert_allclose(model.head()(ours), logits, atol=3e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_layer_is_loaded_on_request_and_otherwise_copied(family: str, tmp_path: Path) -> None:
    model = create(family)
    model.save_pretrained(tmp_path / "a")
    loaded = AutoEasyDeLModelForCausalLM.from_pretrained(
        tmp_path / "a", sharding_axis_dims=ONE, config_kwargs={"mtp_head": "stored"}
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(loaded))
    loaded.save_pretrained(tmp_path / "b")
    plain = AutoEasyDeLModelForCausalLM.from_pretrained(
        tmp_path / "b", sharding_axis_dims=ONE, config_kwargs={"mtp_head": None}
    )
    assert not hasattr(plain, "mtp")
    plain.save_pretrained(tmp_path / "c")
    first, *others = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert any(name.startswith("mtp.layers.0.") for name in first)
    for tensors in others:
        assert tensors.keys() == first.keys()
        assert all(np.array_equal(tensors[name], first[name]) for name in first)


@pytest.mark.nightly
def test_checkpoint_without_layer_gets_a_new_one_only_on_request(tmp_path: Path) -> None:
    fields = {**tiny_llama(vocab_size=96), "sharding_axis_dims": ONE}
    fields.pop("model_type")
    LlamaForCausalLM.create(LlamaConfig(**fields)).save_pretrained(tmp_path)
    options: dict[str, Any] = {"sharding_axis_dims": ONE}
    with pytest.raises(CheckpointError, match=r"missing[^\n]*\n[^\n]*mtp\."):
        AutoEasyDeLModelForCausalLM.from_pretrained(
            tmp_path, config_kwargs={"mtp_head": "stored"}, **options
        )
    model: Any = AutoEasyDeLModelForCausalLM.from_pretrained(
        tmp_path, config_kwargs={"mtp_head": "new"}, **options
    )
    assert float(jnp.std(model.mtp.fc.kernel[...])) > 0
    np.testing.assert_array_equal(model.mtp.norm.weight[...], 1.0)


@pytest.mark.nightly
def test_text_half_of_a_multimodal_checkpoint_has_the_layer(tmp_path: Path) -> None:
    model = create("qwen3_5_text")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {
        re.sub(r"^model\.", "model.language_model.", name): array
        for name, array in load_file(path).items()
    }
    save_file({**tensors, "model.visual.patch.weight": np.ones((2, 2), np.float32)}, path)
    loaded = AutoEasyDeLModelForCausalLM.from_pretrained(
        tmp_path, sharding_axis_dims=ONE, config_kwargs={"mtp_head": "stored"}
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(loaded))
    loaded.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    names = {name for name in tensors if name.startswith("mtp.")}
    assert {name for name in saved if name.startswith("mtp.")} == names
    assert "model.visual.patch.weight" in saved


def test_configuration_of_the_layer_has_one_layer_with_full_attention() -> None:
    config = get_layer_config(Qwen3_5TextConfig(**QWEN, sharding_axis_dims=ONE))
    assert (config.num_hidden_layers, list(config.layer_types)) == (1, ["full_attention"])
    windows = Qwen3_5TextConfig(**{**QWEN, "layer_types": ["linear_attention"] * 4})
    with pytest.raises(ConfigError, match="layer_types has no full_attention"):
        get_layer_config(windows)
