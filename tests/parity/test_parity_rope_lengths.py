"""Rotary factors that depend on length follow each sequence, independent of the rest of the batch.

transformers computes the factors for a whole batch, so the reference evaluates each row alone. A
sequence that grows beyond the original maximum keeps its stored keys, as in transformers.
"""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from ed_esurge import SamplingParams, eSurge
from ed_infra.testing import tiny_llama
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.conformance import forward

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("rope lengths")]
torch = pytest.importorskip("torch")

ORIGINAL = 32
ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}
NEW = 12
SHORT, CROSSING, LONG = 18, 27, 45  # the second sequence grows beyond the original maximum
TOLERANCE = (
    5e-5  # logits reach 3; measured up to 2.4e-5, and 0.6 to 2 with the factor of another length
)


@pytest.fixture(scope="module", params=list(ROPES))
def pair(request, tmp_path_factory):
    """Return Hugging Face's model and ours."""
    name = request.param
    positions = ORIGINAL if name == "dynamic" else 4 * ORIGINAL
    fields = tiny_llama(rope_parameters=ROPES[name], max_position_embeddings=positions)
    del fields["model_type"]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.normal_(1.0 if "norm" in key else 0.0, 0.2)
    folder = tmp_path_factory.mktemp(name)
    model.save_pretrained(folder)
    ours = AutoEasyDeLModelForCausalLM.from_pretrained(
        folder, sharding_axis_dims=(1, 1, 1, 1, 1), config_kwargs={"scan_layers": False}
    )
    return model, ours


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 256, n).astype(np.int32) for n in (SHORT, CROSSING, LONG)]


def padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return right-aligned rows, and the mask of the tokens."""
    width = max(map(len, rows))
    ids, mask = np.zeros((2, len(rows), width), np.int32)
    for row, values in enumerate(rows):
        ids[row, width - len(values) :] = values
        mask[row, width - len(values) :] = 1
    return ids, mask


def theirs(model, ids: np.ndarray, cache=None) -> tuple[np.ndarray, object]:
    with torch.no_grad():
        out = model(torch.tensor(ids[None].astype(np.int64)), past_key_values=cache, use_cache=True)
    return out.logits[0].numpy(), out.past_key_values


def reset(model) -> None:
    """Reset transformers' longest sequence, which it keeps until a short sequence."""
    theirs(model, np.arange(3, 8))


def continued(model, prompt: np.ndarray) -> np.ndarray:
    """Return the greedy tokens of transformers with a cache, for the row alone."""
    reset(model)
    logits, cache = theirs(model, prompt)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < NEW:
        logits, cache = theirs(model, np.asarray(tokens[-1:]), cache)
        tokens.append(int(logits[-1].argmax()))
    return np.asarray(tokens)


def test_forward_logits_match_torch_across_rope_lengths(pair):
    model, ours = pair
    ids, mask = padded(prompts())
    got = np.asarray(forward(ours, input_ids=ids, attention_mask=mask).logits)
    for row, prompt in enumerate(prompts()):
        reset(model)
        np.testing.assert_allclose(
            got[row, -len(prompt) :], theirs(model, prompt)[0], atol=TOLERANCE
        )


@pytest.mark.daily("dynamic")
def test_packed_documents_have_separate_rope_factors(pair):
    model, ours = pair
    rows = prompts()
    ids = np.concatenate(rows)[None]
    segments = np.repeat([1, 2, 3], [len(row) for row in rows])[None].astype(np.int32)
    got = np.asarray(forward(ours, input_ids=ids, segment_ids=segments).logits)[0]
    for part, prompt in zip(
        np.split(got, np.cumsum([len(r) for r in rows])[:-1]), rows, strict=True
    ):
        reset(model)
        np.testing.assert_allclose(part, theirs(model, prompt)[0], atol=TOLERANCE)


@pytest.mark.nightly
def test_cached_decode_logits_match_torch_across_rope_lengths(pair):
    model, ours = pair
    for prompt in prompts():
        following = np.random.default_rng(1).integers(3, 256, NEW).astype(np.int32)
        reset(model)
        _, cache = theirs(model, prompt)
        filled = ours.init_cache(1, 64)
        filled = forward(ours, input_ids=prompt[None], past_key_values=filled).past_key_values
        for token in following:
            expected, cache = theirs(model, np.asarray([token]), cache)
            out = forward(ours, input_ids=token[None, None], past_key_values=filled)
            filled = out.past_key_values
            np.testing.assert_allclose(np.asarray(out.logits)[0], expected, atol=TOLERANCE)


@pytest.mark.nightly
def test_generated_tokens_match_torch_across_rope_lengths(pair):
    model, ours = pair
    ids, mask = padded(prompts())
    made = ours.generate(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=[])
    for row, prompt in enumerate(prompts()):
        np.testing.assert_array_equal(made.sequences[row, ids.shape[1] :], continued(model, prompt))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(64, id="whole", marks=pytest.mark.nightly),
        pytest.param(16, id="in chunks"),
    ],
)
def test_engine_tokens_match_torch_across_rope_lengths(pair, budget):
    """Prompts of all lengths share steps; a small budget splits the longest into chunks."""
    model, ours = pair
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    with eSurge(
        ours,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        page_size=8,
        compile_runner=False,
        silent_mode=True,
    ) as engine:
        for _ in range(2):  # the second time the prompts are in the prefix cache
            outputs = engine.generate([list(map(int, p)) for p in prompts()], params)
            for out, prompt in zip(outputs, prompts(), strict=True):
                assert out.outputs[0].token_ids == continued(model, prompt).tolist()


@pytest.mark.nightly
def test_prefixes_with_other_rope_factors_share_no_page(pair):
    """The first tokens of a long prompt have other keys than those of a short prompt."""
    model, ours = pair
    whole = prompts()[2]
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    with eSurge(
        ours, max_model_len=64, max_num_seqs=2, page_size=8, compile_runner=False, silent_mode=True
    ) as engine:
        for length in (24, len(whole), 24, 40):
            prompt = whole[:length]
            tokens = engine.generate([list(map(int, prompt))], params)[0].outputs[0].token_ids
            assert tokens == continued(model, prompt).tolist(), length
