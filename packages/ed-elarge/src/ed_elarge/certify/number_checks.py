"""Numbers: logits of transformers, the engine, packed rows, adapters, quantized weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from ed_elarge.certify.chats import PASSAGE
from ed_elarge.certify.outcome import ModelCheck, NotApplicable, Outcome, passed, require
from ed_elarge.certify.subject import CertifiedModel

#: Largest difference of logits, relative to the largest logit.
LOGITS_LIMIT = 1e-3
#: Largest difference of log-probabilities.
LOGPROB_LIMIT = 1e-3
#: Largest mean divergence of a quantized model from the model in full precision, in nats.
DIVERGENCE_LIMIT = 0.1
#: Smallest share of positions with equal first choices of the two.
AGREEMENT_LIMIT = 0.5
#: Options with which the engine samples.
SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
LENGTH, GENERATED = 96, 12


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
    own = _logits(subject.model, ids.numpy())
    try:
        other: Any = AutoModelForCausalLM.from_pretrained(subject.folder, dtype="float32")
    except (ValueError, KeyError) as error:
        raise NotApplicable(f"transformers does not load the model: {error}"[:300]) from None
    theirs = other.eval()(ids).logits.detach().numpy()[0]
    return _compared(own, theirs, "transformers", LOGITS_LIMIT)


def engine_samples_as_computed(subject: CertifiedModel) -> Outcome:
    from ed_esurge import SamplingParams, eSurge

    prompt = _passage(subject)[0, :24].tolist()
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64}
    engine = eSurge(subject.model, compile_runner=False, silent_mode=True, **sizes)
    asked = SamplingParams(
        max_tokens=GENERATED,
        seed=1,
        ignore_eos=True,
        logprobs=0,
        logprobs_mode="processed_logprobs",
        detokenize=False,
        **SAMPLING,
    )
    try:
        answer = engine.generate([prompt], asked)[0].outputs[0]
    finally:
        engine.terminate()
    tokens = list(answer.token_ids)
    logits = _logits(subject.model, np.array([[*prompt, *tokens]], np.int64))
    worst = 0.0
    assert answer.logprobs is not None
    for at, (token, given) in enumerate(zip(tokens, answer.logprobs, strict=True)):
        expected = _sampled_from(logits[len(prompt) - 1 + at].astype(np.float64))
        require(
            np.isfinite(expected[token]),
            f"the engine sampled token {token}, which the options of sampling exclude",
        )
        worst = max(worst, abs(given[token].logprob - expected[token]))
    require(
        worst <= LOGPROB_LIMIT,
        f"log-probabilities of the engine differ by {worst:.1e} from those of the model",
    )
    return passed(f"{len(tokens)} tokens with {SAMPLING}, largest difference {worst:.1e}")


def packing_changes_nothing(subject: CertifiedModel) -> Outcome:
    ids = _passage(subject)[0]
    half = len(ids) // 2
    segments = np.array([[1] * half + [2] * (len(ids) - half)], np.int32)
    packed = _logits(subject.model, ids[None], segment_ids=segments)
    alone = np.concatenate(
        [_logits(subject.model, part[None]) for part in (ids[:half], ids[half:])]
    )
    return _compared(packed, alone, "the rows alone", LOGITS_LIMIT)


def merged_equals_adapter(subject: CertifiedModel) -> Outcome:
    if subject.model_folder is None or subject.adapter_folder is None:
        raise NotApplicable("the directory does not contain both a model and its adapter")
    from ed_models.adapters.peft import load_adapter

    adapted = load_adapter(subject.base.model, subject.adapter_folder)
    ids = _passage(subject)
    merged = _logits(subject.model, ids)
    return _compared(merged, _logits(adapted, ids), "the base model with the adapter", LOGITS_LIMIT)


def quantized_stays_near(subject: CertifiedModel) -> Outcome:
    if not subject.settings.get("quantization_config"):
        raise NotApplicable("the weights are not quantized")
    return _near(subject, subject.model, subject.base.model, "the model in full precision")


def gguf_stays_near(subject: CertifiedModel) -> Outcome:
    files = sorted(subject.directory.glob("*.gguf"))
    if not files:
        raise NotApplicable("there is no GGUF file")
    from ed_models.checkpoints import hub

    found = [
        _near(subject, hub.from_pretrained(file), subject.model, "the model").evidence
        for file in files
    ]
    return passed("; ".join(f"{f.name}: {text}" for f, text in zip(files, found, strict=True)))


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
    found = level()
    require(
        found == able[-1],
        f"the kernels use {found or 'no instructions, because they are not built'}, and the "
        f"processor has {able[-1]}: run `python -m ed_layers.native build`",
    )
    return passed(able[-1])


def _flag(option: str) -> str:
    """Return the kernel's name of the instructions of a compiler option."""
    name = option.removeprefix("-m")
    special = {"avxvnni": "avx_vnni", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
    return special.get(name, "asimddp" if "dotprod" in name else name)


def _near(subject: CertifiedModel, own: Any, exact: Any, name: str) -> Outcome:
    ids = _passage(subject)
    ours, theirs = (_log_softmax(_logits(model, ids)) for model in (own, exact))
    divergence = float((np.exp(theirs) * (theirs - ours)).sum(-1).mean())
    agreement = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    evidence = f"KL divergence {divergence:.2e} nats, {agreement:.0%} equal first choices"
    near = divergence <= DIVERGENCE_LIMIT and agreement >= AGREEMENT_LIMIT
    require(near, f"{evidence} against {name}")
    return passed(evidence)


def _passage(subject: CertifiedModel) -> np.ndarray:
    ids = subject.tokenizer.encode(PASSAGE, add_special_tokens=False)[:LENGTH]
    return np.array([ids], np.int64)


def _logits(model: Any, ids: np.ndarray, **inputs: Any) -> np.ndarray:
    """Return the logits of one row, float32 [s, v]."""
    output = model(input_ids=ids.astype(np.int32), **inputs)
    return np.asarray(output.logits, np.float32)[0]


def _compared(own: np.ndarray, other: np.ndarray, name: str, limit: float) -> Outcome:
    width = min(own.shape[-1], other.shape[-1])  # padded vocabularies
    own, other = own[..., :width], other[..., :width]
    error = float(np.abs(own - other).max() / max(np.abs(other).max(), 1e-30))
    require(error <= limit, f"logits differ by {error:.1e} of the largest logit from {name}")
    return passed(f"largest difference {error:.1e} of the largest logit")


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _sampled_from(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of the distribution of `SAMPLING`; -inf for excluded tokens."""
    scaled = logits / SAMPLING["temperature"]
    order = np.argsort(-scaled, kind="stable")[: SAMPLING["top_k"]]
    probs = np.exp(scaled[order] - scaled[order[0]])
    probs /= probs.sum()
    kept = order[np.cumsum(probs) - probs < SAMPLING["top_p"]]
    result = np.full(len(logits), -np.inf)
    result[kept] = _log_softmax(scaled[kept][None])[0]
    return result


CHECKS = (
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
    ModelCheck("gguf", "The GGUF file stays near the model.", gguf_stays_near, True),
    ModelCheck(
        "kernels",
        "The native kernels use the best instructions of the processor.",
        kernels_are_the_best,
        True,
    ),
)
