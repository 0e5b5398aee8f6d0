"""The messages of failed comparisons of the conformance suite."""

import numpy as np
import pytest
from ed_models.conformance.checks import _check_difference


def test_a_failed_comparison_names_its_subject() -> None:
    with pytest.raises(AssertionError, match=r"logits: the largest difference is 1\.00e\+00, abo"):
        _check_difference(np.ones(2), np.zeros(2), 0.5, "logits")
    with pytest.raises(AssertionError, match=r"logits: the shape is \(2,\), expected \(3,\)"):
        _check_difference(np.ones(2), np.zeros(3), 0.5, "logits")
