"""Every family of ed-models has tiny configurations and passes the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_models import conformance
from ed_models.conformance import AGAINST_TORCH, FAST, Cases, Subject

from tests.conformance.cases import cases, subjects
from tests.conformance.results import IMPOSSIBLE, checks

CHECKS = checks()
#: Families that a default run compares with torch: each kind of layers, positions, and inputs once.
COMPARED = {
    # decoders: norms, positions, windows, limits of logits, multipliers, activations
    *("llama", "gpt2", "mistral", "qwen3", "cohere", "gemma2", "gemma3_text", "gpt_oss", "mpt"),
    *("falcon", "phi3", "smollm3", "glm4", "olmo", "granite", "nanochat", "apertus"),
    # experts, latent attention, selected keys, recurrences, convolutions
    *("mixtral", "deepseek_v3", "glm_moe_dsa", "mamba2", "qwen3_next", "recurrent_gemma", "rwkv"),
    *("lfm2",),
    # encoders, and encoders with a decoder
    *("bert", "deberta-v2", "nomic_bert", "t5", "bart"),
    # images and sound
    *("vit", "clip", "llava", "qwen2_vl", "wav2vec2", "whisper"),
}

#: One family of each kind of cache: a default run fills these, CI those of all families.
CACHES = ("llama", "gemma3_text", "deepseek_v3", "mamba2")


def rows() -> list[Any]:
    """Return each configuration with each check; one worker runs all checks of a family.

    A default run compares one family of each kind with torch, and fills one cache of each kind; the
    rest is nightly.
    """
    params, seen = [], set()
    for subject in subjects():
        compared = ("parity",) if subject.model_type in COMPARED else ()
        fast = FAST if subject.model_type in CACHES else compared
        fast = () if subject.model_type in seen else fast
        seen.add(subject.model_type)
        for check in CHECKS:
            if check != "engine" and check not in subject.checks:
                continue
            if check == "engine" and subject.task != TaskType.CAUSAL_LM:
                continue
            if check in AGAINST_TORCH and not subject.is_in_transformers:
                continue
            marks = [pytest.mark.xdist_group(f"conformance {subject.model_type}")]
            marks += [] if check in fast else [pytest.mark.nightly]
            marks += [pytest.mark.torch] if check in AGAINST_TORCH else []
            if reason := IMPOSSIBLE.get((subject.model_type, subject.row, check)):
                marks.append(pytest.mark.xfail(reason=reason, raises=RuntimeError, strict=True))
            params.append(pytest.param(subject, check, marks=marks, id=f"{subject}: {check}"))
    return params


@pytest.mark.parametrize(("subject", "check"), rows())
def test_model_family_passes_conformance_check(
    subject: Subject, check: str, record_property: Callable[[str, object], None]
) -> None:
    error = CHECKS[check](subject)
    record_property("conformance", (subject.model_type, subject.row, check, error))


def test_family_without_configuration_raises_value_error() -> None:
    with pytest.raises(ValueError, match="'llama' has no tiny configuration"):
        conformance.subjects({"llama": Cases({})})


def test_every_family_of_ed_models_has_cases() -> None:
    families = {
        name
        for name in registry.model_types()
        if registry.get_config(name).__module__.startswith("ed_models.")
    }
    assert families == cases().keys()
    assert families >= COMPARED
