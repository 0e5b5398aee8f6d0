"""Adapters on experts in the engine: several in one batch equal PEFT and the merged models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_models.adapters.lora import merge_lora
from ed_models.adapters.peft import save_adapter

from tests.parity.peft_cases import DENSE, our_logits, takes_dense_for_experts, trained
from tests.parity.test_parity_peft import base_of, logits_of, subject_of

pytestmark = [pytest.mark.torch, pytest.mark.nightly]
peft = pytest.importorskip("peft")

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
BOUND = 1e-4
COUNT = 3
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
OPTIONS: dict[str, Any] = {
    "max_loras": 2,
    "max_lora_rank": 4,
    "max_num_seqs": 4,
    "max_num_seq_buckets": (4,),
    "max_num_batched_tokens": 16,
    "max_model_len": 16,
    "page_size": 8,
    "silent_mode": True,
    "compile_runner": False,
}


def build_adapters(family: str) -> dict[str, Any]:
    """Return models with adapters on the experts, and on the experts and other layers."""
    model = subject_of(family).model
    # PEFT mistakes dense and shared networks of some families for experts.
    dense = f"(?!.*{DENSE})" if takes_dense_for_experts(family) else ""
    everything = rf"^(?!lm_head|.*embed|.*kv_b_proj){dense}"
    return {
        "everything": trained(model, LoraSpec(rank=2, alpha=3.0, targets=everything)),
        "experts": trained(model, LoraSpec(rank=3, targets=r"\.experts\.down_proj")),
    }


def check_output(output: Any, prompt: list[int], logits: np.ndarray) -> None:
    """Compare greedy tokens and their log-probabilities with the logits [s, v] of all tokens."""
    import jax

    tokens = output.outputs[0].token_ids
    expected = np.asarray(jax.nn.log_softmax(logits[len(prompt) - 1 : -1], axis=-1))
    assert list(expected.argmax(-1)) == list(tokens)
    pairs = zip(output.outputs[0].logprobs, tokens, strict=True)
    got = [logprobs[token].logprob for logprobs, token in pairs]
    np.testing.assert_allclose(got, expected.max(-1), atol=BOUND)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_of_adapters_equals_peft_and_merged_models(family: str, tmp_path: Path) -> None:
    subject, adapters = subject_of(family), build_adapters(family)
    engine = eSurge(subject.model, lora_targets=("",), **OPTIONS)
    for name, model in adapters.items():
        save_adapter(model, tmp_path / name)
        engine.load_lora_adapter(name, tmp_path / name)
    prompt = [int(token) for token in subject.ids[0][:7]]
    names = ["everything", None, "experts"]
    outputs = dict(zip(names, engine.generate([prompt] * 3, GREEDY, lora_name=names), strict=True))
    for name, output in outputs.items():
        ids = np.asarray([[*prompt, *output.outputs[0].token_ids]], np.int32)
        theirs = base_of(subject)
        if name is not None:
            theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / name).eval()
            check_output(output, prompt, our_logits(merge_lora(adapters[name]), ids)[0])
        check_output(output, prompt, logits_of(theirs, ids)[0])
    # The place of an adapter is used again, without numbers or pages of the first one.
    engine.unload_lora_adapter("everything")
    engine.load_lora_adapter("again", adapters["experts"])
    again = engine.generate(prompt, GREEDY, lora_name="again")[0]
    assert again.outputs[0].token_ids == outputs["experts"].outputs[0].token_ids


@pytest.mark.parametrize("method", ["standard_moe", "fused_moe", "dense_moe"])
def test_every_method_on_a_mesh_computes_adapters_of_experts(method: str, tmp_path: Path) -> None:
    subject, adapters = subject_of("mixtral"), build_adapters("mixtral")
    subject.model.save_pretrained(tmp_path)
    changes = {"moe_method": method, "moe_force_xla_gmm": True}
    config = {"sharding_axis_dims": (1, 1, 2, 2, 1), **changes}
    model = type(subject.model).from_pretrained(tmp_path, config_kwargs=config)
    engine = eSurge(model, lora_targets=("experts",), **OPTIONS)
    engine.load_lora_adapter("experts", adapters["experts"])
    prompt = [int(token) for token in subject.ids[0][:7]]
    outputs = engine.generate([prompt] * 2, GREEDY, lora_name=["experts", None])
    for output, reference in zip(outputs, (adapters["experts"], subject.model), strict=True):
        ids = np.asarray([[*prompt, *output.outputs[0].token_ids]], np.int32)
        check_output(output, prompt, our_logits(reference, ids)[0])


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_experts_over_codes_have_adapters(form: str) -> None:
    model = subject_of("qwen3_moe").model.quantize({"dtype": form})
    adapted = trained(model, LoraSpec(rank=2, targets="experts"))
    engine = eSurge(model, lora_targets=("experts",), **OPTIONS)
    engine.load_lora_adapter("experts", adapted)
    prompt = [int(token) for token in subject_of("qwen3_moe").ids[0][:7]]
    (output,) = engine.generate(prompt, GREEDY, lora_name="experts")
    ids = np.asarray([[*prompt, *output.outputs[0].token_ids]], np.int32)
    check_output(output, prompt, our_logits(adapted, ids)[0])


def test_engine_without_slots_of_experts_names_the_option() -> None:
    engine = eSurge(subject_of("mixtral").model, **OPTIONS)
    with pytest.raises(ConfigError, match=r"experts without slots \(lora_targets: "):
        engine.load_lora_adapter("experts", build_adapters("mixtral")["experts"])
