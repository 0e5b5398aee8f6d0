"""Comparisons of every loss of ed-trainers with a reference, on a tiny model and one batch."""

from tools.method_cases import encoders, groups, labelled, policies, preference, scores, supervised
from tools.method_cases.harness import Case

#: Comparison by name: the method and its options.
CASES: dict[str, Case] = {
    **supervised.CASES,
    **preference.CASES,
    **labelled.CASES,
    **scores.CASES,
    **encoders.CASES,
    **groups.CASES,
    **policies.CASES,
}
