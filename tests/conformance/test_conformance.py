"""Every registered family passes the conformance suite; a family without a row fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ed_models import conformance
from ed_models.conformance import AGAINST_TORCH, FAST, Subject

from tools.conformance_results import IMPOSSIBLE, checks

CHECKS = checks()

#: One family of each kind of cache and state: a default run fills these.
CACHES = (
    *("llama", "gemma3_text", "gemma4_text", "llama4_text", "gpt_oss", "mpt"),
    *("deepseek_v3", "deepseek_v32", "mamba", "mamba2", "jamba", "falcon_h1", "rwkv"),
    *("recurrent_gemma", "kimi_linear", "qwen3_next", "minimax", "lfm2"),
)


def rows() -> list[Any]:
    """Each configuration with each check; one worker has all of a family.

    A default run compares every configuration with torch, and fills one cache of each kind; the
    rest is nightly.
    """
    params, seen = [], set()
    for subject in conformance.subjects():
        first = subject.model_type not in seen
        fast = FAST if first and subject.model_type in CACHES else ("parity",)
        seen.add(subject.model_type)
        for check in CHECKS:
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


def test_a_family_without_a_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    module_class = conformance.subjects("llama")[0].module_class
    monkeypatch.setattr(module_class, "CONFORMANCE", {})
    with pytest.raises(ValueError, match="lists no tiny configuration"):
        conformance.subjects("llama")
