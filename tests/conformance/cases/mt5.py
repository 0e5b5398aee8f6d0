"""Conformance cases of mT5."""

from ed_models.conformance import Cases

from tests.conformance.cases.t5 import TINY_T5

CASES = Cases(
    {
        "separate head": {**TINY_T5, "tie_word_embeddings": False},
        "tied, two decoder layers": {
            **TINY_T5,
            "num_decoder_layers": 2,
        },
    },
    ours=2e-4,  # scores have no scale, as in T5
    tiny=False,
    exact_reference=True,
)
