"""Tiny configurations of mistral."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "window": {"sliding_window": 6},
        "no window, own head size": {"sliding_window": None, "head_dim": 12},
    }
)
