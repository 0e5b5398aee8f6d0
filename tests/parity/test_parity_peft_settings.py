"""Every setting of PEFT's adapters is applied as in PEFT, or the adapter is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.adapters import peft_settings
from ed_models.adapters.lora import merge_lora
from ed_models.adapters.peft import load_adapter, read_adapter, save_adapter

from tests.parity.peft_cases import our_logits
from tests.parity.test_parity_peft import base_of, logits_of, subject_of

pytestmark = pytest.mark.torch
peft = pytest.importorskip("peft")

#: PEFT computes the residual of the base in float32.
BOUND = 4e-5
TARGETS = {
    "llama": ["q_proj", "down_proj"],
    "phi3": ["qkv_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "gpt_neox": ["query_key_value", "dense"],
}


def saved_adapter(family: str, folder: Path, **settings: Any) -> np.ndarray:
    """Save a changed adapter with PEFT, and return the logits of PEFT after it is loaded again."""
    import torch

    subject = subject_of(family)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=7,
        target_modules=TARGETS[family],
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
        **settings,
    )
    model = peft.get_peft_model(base_of(subject), config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                value.add_(0.05 * torch.randn_like(value))
    model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base_of(subject), folder).eval()
    return logits_of(loaded, subject.ids)


def edit_settings(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.daily("llama-pissa", "llama-olora")
@pytest.mark.parametrize(
    "case",
    [
        f"{family}-{start}{variant}"
        for family in TARGETS
        for start in ("pissa", "olora", "eva", "orthogonal", "gaussian")
        for variant in ("", "-dora", "-rslora")
        if (family, start) != ("gpt2", "olora")  # PEFT cannot compute this combination
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_initial_values_of_adapters_are_those_of_peft(case: str, tmp_path: Path) -> None:
    family, start, *variant = case.split("-")
    settings = {f"use_{name}": True for name in variant}
    expected = saved_adapter(family, tmp_path / "peft", init_lora_weights=start, **settings)
    subject = subject_of(family)
    model = load_adapter(subject.model, tmp_path / "peft")
    assert np.abs(expected - subject.logits).max() > 1e-3
    np.testing.assert_allclose(our_logits(model, subject.ids), expected, atol=BOUND)
    merged = merge_lora(model)
    np.testing.assert_allclose(our_logits(merged, subject.ids), expected, atol=BOUND)
    if start in ("pissa", "olora"):  # saved as plain adapters, which fit the original base
        save_adapter(model, tmp_path / "plain")
        again = peft.PeftModel.from_pretrained(base_of(subject), tmp_path / "plain").eval()
        np.testing.assert_allclose(logits_of(again, subject.ids), expected, atol=BOUND)


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_engine_subtracts_the_initial_part_of_an_adapter_of_peft(
    start: str, tmp_path: Path
) -> None:
    from ed_esurge import SamplingParams, eSurge

    saved_adapter("llama", tmp_path, init_lora_weights=start)
    subject = subject_of("llama")
    engine = eSurge(
        subject.model,
        max_loras=1,
        max_num_seqs=1,
        max_model_len=16,
        page_size=8,
        silent_mode=True,
        compile_runner=False,
    )
    engine.load_lora_adapter("start", tmp_path)
    prompt = [int(token) for token in subject.ids[0][:6]]
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    (output,) = engine.generate(prompt, greedy, lora_name="start")
    tokens = output.outputs[0].token_ids
    ids = np.asarray([[*prompt, *tokens]], np.int32)
    logits = our_logits(load_adapter(subject.model, tmp_path), ids)[0, len(prompt) - 1 : -1]
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    pairs = zip(output.outputs[0].logprobs, tokens, strict=True)
    got = [logprobs[token].logprob for logprobs, token in pairs]
    np.testing.assert_allclose(got, expected.max(-1), atol=BOUND)


def test_every_setting_of_peft_is_known() -> None:
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    known = peft_settings._APPLIED | peft_settings._WITHOUT_EFFECT | {*peft_settings._UNSUPPORTED}
    assert not names - known


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    saved_adapter("llama", folder)
    return folder


REFUSED = {
    "init_lora_weights": ["corda", "lora_ga", "pissa_niter_16", "unknown"],
    "bias": ["all", "lora_only"],
    "lora_bias": [True],
    "layer_replication": [[[0, 2], [1, 3]]],
    "use_qalora": [True],
    "use_bdlora": [{"target_modules_bd_a": ["q_proj"], "nblocks": 2}],
    "alora_invocation_tokens": [[1, 2]],
    "trainable_token_indices": [[1, 2], {"embed_tokens": [1]}],
    "megatron_config": [{"hidden_size": 8}],
    "velora_config": [{"rank": 2}],
    "monteclora_config": [{"samples": 2}],
    "arrow_config": [{"top_k": 2}],
    "kasa_config": [{"beta": 0.1}],
    "ensure_weight_tying": [True],
    "enable_lora": [[True, False]],
    "use_dorra": [True],
    "scaling_factor": [2.0],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_settings_that_change_numbers_are_refused_by_name(
    adapter: Path, name: str, value: Any, tmp_path: Path
) -> None:
    for file in adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_settings(tmp_path, **{name: value})
    with pytest.raises(ConfigError, match=name):
        read_adapter(subject_of("llama").model, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers_pattern", "layers"),
        ("layers_to_transform", [0, 1]),
        ("exclude_modules", ["lm_head"]),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM"}),
        ("merge_weights", False),
        ("enable_lora", None),
        ("a_later_setting", None),
    ],
)
def test_settings_without_effect_are_accepted(
    adapter: Path, name: str, value: Any, tmp_path: Path
) -> None:
    for file in adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_settings(tmp_path, **{name: value})
    assert read_adapter(subject_of("llama").model, tmp_path)


def test_rank_that_contradicts_the_settings_is_refused(adapter: Path, tmp_path: Path) -> None:
    for file in adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_settings(tmp_path, r=8)
    with pytest.raises(CheckpointError, match="the rank is 4, and the settings have 8"):
        read_adapter(subject_of("llama").model, tmp_path)
