"""A decode step on one GPU consists of few kernels, and equals the step of plain XLA.

Without a GPU, the kernels are interpreted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers import native
from ed_layers.cache.hybrid import HybridCache
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.fixed_order import KernelChoice
from ed_layers.projections import few_rows_gpu
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.auto import AutoEasyDeLConfig
from jax.experimental import pallas

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "scan_layers": False,
    "easy_method": "serve",
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}
#: Kernels of a layer besides attention.
USUAL = {
    "project_and_store": 1,
    "parts_of_few_rows": 2,
    "product_of_few_rows": 1,
    "sum_and_norm": 2,
}
#: Model type -> further fields, and the kernels of a layer.
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama": ({}, USUAL),
    "qwen2": ({}, USUAL),
    "qwen3": ({"head_dim": 32}, USUAL),
    # Norms before the additions.
    "gemma3_text": ({"query_pre_attn_scalar": 16, "head_dim": 16}, {**USUAL, "sum_and_norm": 0}),
    # A factor on the outputs.
    "granite": ({"residual_multiplier": 0.5}, {**USUAL, "sum_and_norm": 0}),
}


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Choose the kernels of a GPU, interpret them, and count them by name."""
    call, counts = pallas.pallas_call, Counter[str]()

    def interpret(*arguments: Any, **options: Any) -> Any:
        counts[options["name"]] += 1
        return call(*arguments, **{**options, "interpret": jax.default_backend() != "gpu"})

    choice = KernelChoice(on_one_gpu=True)
    monkeypatch.setattr(pallas, "pallas_call", interpret)
    monkeypatch.setattr(few_rows_gpu, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(native, "chosen_by", lambda config: choice.restore())
    return counts


def run_step(model: Any, tokens: int) -> np.ndarray:
    """Return the logits of a step of two sequences: three tokens of the first, or one of each."""
    cache = HybridCache.create_paged(
        model.cache_specs(), num_pages=8, page_size=4, dtype=jnp.bfloat16, layout="leaves"
    ).simplest()
    q_lens = np.array([tokens - 1, 1]) if tokens > 2 else np.array([1, 1])
    slots = [*range(4, 3 + tokens), 8] if tokens > 2 else [4, 8]
    seq = np.repeat([0, 1], q_lens)

    def array(x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.int32)

    ragged = RaggedBatch(
        cu_q_lens=array([0, *np.cumsum(q_lens)]),
        kv_lens=array(q_lens),
        seq_of_token=array(seq),
        slots={group: array(slots) for group in ("full", "window")},
        page_table={group: array([[1, 0], [2, 0]]) for group in ("full", "window")},
        state_slots=array([0, 1]),
        num_seqs=array(2),
        decode_only=tokens == 2,
    )
    out = model(array([np.arange(tokens) + 5]), past_key_values=cache, ragged=ragged)
    return np.asarray(out.logits, np.float64)


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", [2, 4], ids=["2", "4"])
@pytest.mark.parametrize("kind", MODELS)
def test_step_with_few_kernels_equals_plain_xla(
    kind: str, tokens: int, request: pytest.FixtureRequest
) -> None:
    fields, kernels = MODELS[kind]
    config = AutoEasyDeLConfig.for_model(kind, **SIZES, **fields)
    model: Any = AutoEasyDeLModelForCausalLM.from_config(config)
    expected = run_step(model, tokens)
    counts: Counter[str] = request.getfixturevalue("as_on_gpu")
    result = run_step(model, tokens)
    assert np.abs(result - expected).max() <= 0.03 * np.abs(expected).max()
    assert {name: counts[name] / LAYERS for name in kernels} == kernels
