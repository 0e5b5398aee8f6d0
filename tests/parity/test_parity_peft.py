"""Adapter files work in both directions between this project and PEFT, for all storage layouts.

The layouts: matrices stored as here, joined in one matrix, interleaved, and transposed.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.specs import LoraSpec
from ed_models.adapters.lora import apply_lora, has_lora, merge_lora, remove_lora
from ed_models.adapters.peft import load_adapter, save_adapter
from ed_models.conformance import Subject
from flax import nnx

from tests.conformance.cases import subjects
from tests.parity.peft_cases import our_logits, trained

pytestmark = pytest.mark.torch
peft = pytest.importorskip("peft")

BOUND = 1e-5
CASES = {
    "llama": (LoraSpec(rank=3, alpha=5.0), ["q_proj", "v_proj", "down_proj"]),
    "phi3": (LoraSpec(rank=2, rslora=True), ["qkv_proj", "down_proj"]),
    "gpt2": (LoraSpec(rank=4, dora=True), ["c_attn", "c_fc"]),
    "gpt_neox": (LoraSpec(rank=2), ["query_key_value", "embed_in"]),
    "gemma2": (LoraSpec(rank=3, targets=("q_proj", "embed_tokens")), ["o_proj", "embed_tokens"]),
}


class Small(Subject):
    """Return initial weights of usual size: the logits, and so their rounding errors, are small."""

    @functools.cached_property
    def torch_model(self) -> Any:
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.model_type, **self.fields)
        return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@functools.cache
def subject_of(family: str) -> Subject:
    row = subjects(family)[-1]
    return Small(family, row.row, row.module_class, row.cases)


def base_of(subject: Subject) -> Any:
    """Return a torch model for an adapter to change."""
    return copy.deepcopy(subject.torch_model)


def logits_of(torch_model: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return torch_model(torch.tensor(ids, dtype=torch.long)).logits.float().numpy()


@pytest.mark.daily("llama")
@pytest.mark.parametrize("family", CASES)
def test_saved_adapter_produces_same_logits_in_peft(family: str, tmp_path: Path) -> None:
    subject, (spec, _) = subject_of(family), CASES[family]
    model = trained(subject.model, spec)
    ours = our_logits(model, subject.ids)
    assert np.abs(ours - subject.logits).max() > 1e-3
    save_adapter(model, tmp_path, base="base")
    theirs = peft.PeftModel.from_pretrained(base_of(subject), tmp_path).eval()
    np.testing.assert_allclose(logits_of(theirs, subject.ids), ours, atol=BOUND)
    # Loaded again, merged, and removed.
    again = load_adapter(subject.model, tmp_path)
    np.testing.assert_allclose(our_logits(again, subject.ids), ours, atol=BOUND)
    if (
        family == "gemma2"
    ):  # Tied weights: the head has no adapter, so head and embedding can no longer be one matrix.
        with pytest.raises(ConfigError, match="merged they would be two"):
            merge_lora(model)
        return
    merged = merge_lora(model)
    assert not has_lora(merged)
    np.testing.assert_allclose(our_logits(merged, subject.ids), ours, atol=BOUND)
    before = jax.tree.leaves(nnx.state(subject.model))
    after = jax.tree.leaves(nnx.state(remove_lora(model)))
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def saved_peft_model(subject: Any, settings: Any, folder: Path) -> Any:
    """Return PEFT's model with a random adapter, which is also saved."""
    import torch

    theirs = peft.get_peft_model(base_of(subject), settings).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "magnitude" in name:
                value.mul_(1 + 0.3 * torch.rand_like(value))
            elif "lora_" in name:
                value.normal_(0, 0.1)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.daily("gpt2")
@pytest.mark.parametrize("family", CASES)
def test_peft_adapter_produces_same_logits_when_loaded(family: str, tmp_path: Path) -> None:
    subject, (spec, targets) = subject_of(family), CASES[family]
    settings = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=7,
        target_modules=targets,
        use_rslora=spec.rslora,
        use_dora=spec.dora,
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
    )
    theirs = saved_peft_model(subject, settings, tmp_path)
    model = load_adapter(subject.model, tmp_path)
    np.testing.assert_allclose(
        our_logits(model, subject.ids), logits_of(theirs, subject.ids), atol=BOUND
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "targets"), [("llama", ["q_proj", "down_proj"]), ("gpt2", ["c_attn", "c_fc"])]
)
def test_served_dora_adapter_produces_the_log_probabilities_of_peft(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    from ed_esurge import SamplingParams, eSurge

    subject = subject_of(family)
    settings = peft.LoraConfig(
        r=4,
        target_modules=targets,
        use_dora=True,
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
    )
    theirs = saved_peft_model(subject, settings, tmp_path)
    options = {"compile_runner": False, "silent_mode": True, "max_num_seqs": 2}
    engine = eSurge(subject.model, max_loras=1, max_lora_rank=4, **options)
    engine.load_lora_adapter("dora", tmp_path)
    ids = subject.ids[:1]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    got = engine.generate([ids[0].tolist()] * 2, params, lora_name=["dora", None])
    for output, logits in zip(got, (logits_of(theirs, ids), subject.logits[:1]), strict=True):
        expected = jax.nn.log_softmax(logits[0].astype(np.float64), axis=-1)
        assert output.prompt_logprobs is not None
        for position, token in enumerate(ids[0][1:]):
            ours = output.prompt_logprobs[position + 1]
            assert ours is not None
            assert abs(ours[int(token)].logprob - float(expected[position, token])) <= 1e-5


def test_adapter_for_another_model_is_rejected_with_all_mismatches(tmp_path: Path) -> None:
    """The error lists all mismatches with the nearest names."""
    save_adapter(trained(subject_of("llama").model, LoraSpec(rank=2)), tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"another model[\s\S]*gate_proj: no such[\s\S]*gate_up_proj[\s\S]*and 5 more",
    ):
        load_adapter(subject_of("phi3").model, tmp_path)
    with pytest.raises(ConfigError, match="has no adapters"):
        save_adapter(subject_of("llama").model, tmp_path)
    with pytest.raises(ConfigError, match="matches no"):
        apply_lora(subject_of("llama").model, LoraSpec(targets="qproj"))


def test_model_with_adapters_saves_adapters(tmp_path: Path) -> None:
    model = trained(subject_of("llama").model, LoraSpec(rank=2))
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    with pytest.raises(CheckpointError, match="holds an adapter"):
        type(model).from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="merge them first"):
        model.to_torch()
    with pytest.raises(ConfigError, match="float32"):
        model.save_pretrained(tmp_path, dtype="bfloat16")
