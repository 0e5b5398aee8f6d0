"""Tiny configurations of kimi_k2."""

from ed_models.conformance import Cases

from tests.conformance.cases import deepseek_v3

CASES = Cases(
    {
        "one group": {
            **deepseek_v3.CASES.rows["groups, yarn"],
            "n_group": 1,
            "topk_group": 1,
        }
    }
)
