"""Comparisons of every loss of ed-trainers with a reference, on a tiny model and one batch."""

from tests.parity.method_cases import (
    answers,
    drafts,
    encoder_decoders,
    encoders,
    groups,
    images,
    labelled,
    policies,
    preference,
    scores,
    self_distillation,
    similarity,
    speech,
    supervised,
)
from tests.parity.method_cases.harness import Case

#: Comparison by name: the method and its options.
CASES: dict[str, Case] = {
    **supervised.CASES,
    **preference.CASES,
    **labelled.CASES,
    **scores.CASES,
    **encoders.CASES,
    **similarity.CASES,
    **answers.CASES,
    **encoder_decoders.CASES,
    **speech.CASES,
    **images.CASES,
    **groups.CASES,
    **self_distillation.CASES,
    **policies.CASES,
    **drafts.CASES,
}
