"""Conformance cases of DeiT."""

from ed_models.conformance import Cases

from tests.conformance.cases.vit import TASKS, TINY

# transformers has two classifiers of this type, and chooses by the name.
CASES = Cases(
    {"base": {**TINY, "architectures": ["DeiTForImageClassification"]}}, tiny=False, tasks=TASKS
)
