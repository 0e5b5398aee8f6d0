"""The conformance suite: checks that every model family must pass on tiny configurations.

A test file lists tiny configurations of a family (`Cases`) and runs the suite:

    import pytest
    from ed_models.conformance import CHECKS, Cases, Subject, subjects

    CASES = {"my_model": Cases({"two key heads": {}, "tied": {"tie_word_embeddings": True}})}

    @pytest.mark.parametrize("check", CHECKS)
    @pytest.mark.parametrize("subject", subjects(CASES), ids=str)
    def test_conformance(subject: Subject, check: str) -> None:
        if check in subject.checks:
            CHECKS[check](subject)

The task of a family determines the checks: an encoder has no cache, and only language models
generate. A check returns the largest error, and raises AssertionError if the error exceeds the
bound. The checks against Hugging Face need torch and a model type of `transformers`; the other
checks use random weights. Several checks need eight devices (simulated devices are sufficient).
"""

from ed_models.conformance.checks import AGAINST_TORCH as AGAINST_TORCH
from ed_models.conformance.checks import CHECKS as CHECKS
from ed_models.conformance.checks import FAST as FAST
from ed_models.conformance.checks import MESHES as MESHES
from ed_models.conformance.checks import OURS as OURS
from ed_models.conformance.checks import Check as Check
from ed_models.conformance.subjects import ONE as ONE
from ed_models.conformance.subjects import PAD as PAD
from ed_models.conformance.subjects import TINY as TINY
from ed_models.conformance.subjects import B as B
from ed_models.conformance.subjects import Cases as Cases
from ed_models.conformance.subjects import S as S
from ed_models.conformance.subjects import Subject as Subject
from ed_models.conformance.subjects import forward as forward
from ed_models.conformance.task_subjects import ENCODER_TASKS as ENCODER_TASKS
from ed_models.conformance.task_subjects import TINY_BART as TINY_BART
from ed_models.conformance.task_subjects import TINY_ENCODER as TINY_ENCODER
from ed_models.conformance.task_subjects import subjects as subjects
