"""Numbers: logits of transformers, the engine, packed rows, adapters, quantized weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from ed_elarge.certify.chats import PASSAGE
from ed_elarge.certify.comparisons import (
    LENGTH,
    LOGITS_LIMIT,
    compare_distributions,
    compare_logits,
    compute_logits,
    log_softmax,
)
from ed_elarge.certify.outcome import ModelCheck, NotApplicable, Outcome, pass_check, require_claim
from ed_elarge.certify.subject import CertifiedModel

#: Largest difference of log-probabilities.
LOGPROB_LIMIT = 1e-3
#: Options with which the engine samples.
SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
#: Log-probabilities after all options of sampling.
LOGPROBS_MODE = "processed_logprobs"
GENERATED = 12


def equals_transformers(subject: CertifiedModel) -> Outcome:
    if subject.is_adapter:
        raise NotApplicable("the directory contains only an adapter")
    if subject.settings.get("quantization_config"):
        raise NotApplicable("the weights are quantized")
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_torch_available

    if not is_torch_available():
        raise NotApplicable("torch is not installed")
    encoded = subject.tokenizer(PASSAGE, add_special_tokens=False, return_tensors="pt")
    ids = encoded["input_ids"][:, :LENGTH]
    model_logits = compute_logits(subject.model, ids.numpy()[0])
    try:
        reference_model = AutoModelForCausalLM.from_pretrained(subject.folder, dtype="float32")
    except (ValueError, KeyError) as error:
        raise NotApplicable(f"transformers does not load the model: {error}"[:300]) from None
    theirs = reference_model.eval()(ids).logits.detach().numpy()[0]
    return pass_check(compare_logits(model_logits, theirs, "transformers", LOGITS_LIMIT))


def engine_samples_as_computed(subject: CertifiedModel) -> Outcome:
    from ed_esurge import SamplingParams, eSurge

    prompt = _passage(subject)[:24].tolist()
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64}
    engine = eSurge(subject.model, compile_runner=False, silent_mode=True, **sizes)
    sampling_params = SamplingParams(
        max_tokens=GENERATED,
        seed=1,
        ignore_eos=True,
        logprobs=0,
        logprobs_mode=LOGPROBS_MODE,
        detokenize=False,
        **SAMPLING,
    )
    try:
        answer = engine.generate([prompt], sampling_params)[0].outputs[0]
    finally:
        engine.terminate()
    tokens = list(answer.token_ids)
    logits = compute_logits(subject.model, np.array([*prompt, *tokens]))
    worst = 0.0
    assert answer.logprobs is not None
    for at, (token, token_logprobs) in enumerate(zip(tokens, answer.logprobs, strict=True)):
        expected = _sampled_from(logits[len(prompt) - 1 + at].astype(np.float64))
        require_claim(
            np.isfinite(expected[token]),
            f"the engine sampled token {token}, which the options of sampling exclude",
        )
        worst = max(worst, abs(token_logprobs[token].logprob - expected[token]))
    require_claim(
        worst <= LOGPROB_LIMIT,
        f"log-probabilities of the engine differ by {worst:.1e} from those of the model",
    )
    return pass_check(f"{len(tokens)} tokens with {SAMPLING}, largest difference {worst:.1e}")


def packing_changes_nothing(subject: CertifiedModel) -> Outcome:
    ids = _passage(subject)
    half = len(ids) // 2
    segments = np.array([[1] * half + [2] * (len(ids) - half)], np.int32)
    packed = compute_logits(subject.model, ids, segment_ids=segments)
    separate_logits = np.concatenate(
        [compute_logits(subject.model, part) for part in (ids[:half], ids[half:])]
    )
    return pass_check(compare_logits(packed, separate_logits, "the rows alone", LOGITS_LIMIT))


def merged_equals_adapter(subject: CertifiedModel) -> Outcome:
    if subject.model_folder is None or subject.adapter_folder is None:
        raise NotApplicable("the directory does not contain both a model and its adapter")
    from ed_models.adapters.peft import load_adapter

    adapted = load_adapter(subject.base.model, subject.adapter_folder)
    ids = _passage(subject)
    merged = compute_logits(subject.model, ids)
    theirs = compute_logits(adapted, ids)
    return pass_check(
        compare_logits(merged, theirs, "the base model with the adapter", LOGITS_LIMIT)
    )


def quantized_stays_near(subject: CertifiedModel) -> Outcome:
    if not subject.settings.get("quantization_config"):
        raise NotApplicable("the weights are not quantized")
    ids = _passage(subject)
    model_logits = compute_logits(subject.model, ids)
    exact = compute_logits(subject.base.model, ids)
    return pass_check(compare_distributions(model_logits, exact, "the model in full precision"))


def kernels_are_the_best(subject: CertifiedModel) -> Outcome:
    import platform

    import jax
    from ed_infra.compilation.fingerprint import instructions
    from ed_layers.native.build import LEVELS
    from ed_layers.native.library import level

    if jax.default_backend() != "cpu" or platform.machine() not in LEVELS:
        raise NotApplicable("no native kernels for this machine")
    lines = [line for line in instructions() if line.startswith(("flags", "Features"))]
    if not lines:
        raise NotApplicable("the instructions of this processor are unknown")
    flags = set(lines[0].partition(":")[2].split())
    levels = LEVELS[platform.machine()]
    able = [name for _, name, needed in levels if {_flag(f) for f in needed} <= flags]
    kernel_level = level()
    require_claim(
        kernel_level == able[-1],
        f"the kernels use {kernel_level or 'no instructions, because they are not built'}, and the "
        f"processor has {able[-1]}: run `python -m ed_layers.native build`",
    )
    return pass_check(able[-1])


def _flag(option: str) -> str:
    """Return the kernel's name of the instructions of a compiler option."""
    name = option.removeprefix("-m").replace("-", "_")
    special = {"avxvnni": "avx_vnni", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
    return special.get(name, "asimddp" if "dotprod" in name else name)


def _passage(subject: CertifiedModel) -> np.ndarray:
    ids = subject.tokenizer.encode(PASSAGE, add_special_tokens=False)[:LENGTH]
    return np.array(ids, np.int64)


def _sampled_from(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of the distribution of `SAMPLING`; -inf for excluded tokens.

    Tokens with equal logits are kept or excluded together, as in the engine.
    """
    scaled = logits / SAMPLING["temperature"]
    order = np.argsort(-scaled, kind="stable")[: SAMPLING["top_k"]]
    probs = np.exp(scaled[order] - scaled[order[0]])
    probs /= probs.sum()
    sampling_mask = scaled >= np.min(scaled[order[np.cumsum(probs) - probs < SAMPLING["top_p"]]])
    result = np.full(len(logits), -np.inf)
    result[sampling_mask] = log_softmax(scaled[sampling_mask][None])[0]
    return result


NUMBER_CHECKS = (
    ModelCheck("transformers", "transformers computes the same logits.", equals_transformers, True),
    ModelCheck(
        "engine",
        "The engine's log-probabilities are those of the model, as sampled.",
        engine_samples_as_computed,
        True,
    ),
    ModelCheck(
        "packing", "Packed rows have the logits of the rows alone.", packing_changes_nothing, True
    ),
    ModelCheck(
        "merge", "The merged model has the logits of the adapter.", merged_equals_adapter, True
    ),
    ModelCheck(
        "quantization",
        "The quantized model stays near the model in full precision.",
        quantized_stays_near,
        True,
    ),
    ModelCheck(
        "kernels",
        "The native kernels use the best instructions of the processor.",
        kernels_are_the_best,
        True,
    ),
)
