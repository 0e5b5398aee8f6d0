"""Beam search against `transformers`: tokens, scores and where each token came from."""

import jax
import numpy as np
import pytest
from ed_infra.testing import require_torch
from ed_models.families.gemma2 import Gemma2Config, Gemma2ForCausalLM
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

V, S, NEW = 40, 9, 12
END, PAD = 7, 3


@pytest.fixture(scope="module")
def config():
    return LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=None,
        initializer_range=0.4,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )


@pytest.fixture(scope="module")
def model(config):
    return LlamaForCausalLM.create(config, seed=3)


@pytest.fixture(scope="module")
def torch_model(model, tmp_path_factory):
    require_torch()
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("beams")
    model.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()


@pytest.fixture(scope="module")
def prompt():
    """Two rows, the second with three tokens of padding on the left."""
    rng = np.random.default_rng(1)
    ids = rng.choice([t for t in range(V) if t not in (END, PAD)], (2, S))
    mask = np.ones_like(ids)
    ids[1, :3], mask[1, :3] = PAD, 0
    return ids, mask


def both(model, torch_model, prompt, **options):
    import torch

    ids, mask = prompt
    common = {"max_new_tokens": NEW, "output_scores": True} | options
    theirs = torch_model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        return_dict_in_generate=True,
        do_sample=False,
        **common,
    )
    return model.generate(ids, attention_mask=mask, **common), theirs


def agree(ours, theirs):
    expected = theirs.sequences.numpy()
    np.testing.assert_array_equal(ours.sequences, expected)
    np.testing.assert_allclose(
        ours.sequences_scores, theirs.sequences_scores.numpy(), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(ours.beam_indices, theirs.beam_indices.numpy())
    assert len(ours.scores) == len(theirs.scores)


@pytest.mark.nightly
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.5, 2.0])  # of one program
def test_tokens_and_scores_are_hugging_faces(
    model, torch_model, prompt, early_stopping, length_penalty
):
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    ours, theirs = both(model, torch_model, prompt, num_beams=4, num_return_sequences=3, **options)
    agree(ours, theirs)
    assert ours.sequences.shape[0] == 6
    assert (ours.sequences[:, S:] == END).any()  # some ended


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "eos_token_id": [END, 11], "min_new_tokens": 5, "max_new_tokens": 6},
        {"num_beams": 4, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in (
                {"num_beams": 2, "eos_token_id": [END, 11, 12]},
                {"num_beams": 3, "bad_words_ids": [[5], [9, 4]], "renormalize_logits": True},
                {"num_beams": 4, "max_new_tokens": 1},
                {"num_beams": 5, "forced_eos_token_id": END, "length_penalty": 0.5},
            )
        ),
    ],
)
def test_other_options_go_with_beams(model, torch_model, prompt, options):
    ours, theirs = both(model, torch_model, prompt, **options)
    agree(ours, theirs)


@pytest.mark.nightly
def test_scores_of_steps_are_hugging_faces(model, torch_model, prompt):
    ours, theirs = both(model, torch_model, prompt, num_beams=3, output_logits=True)
    for name in ("scores", "logits"):
        expected = np.stack([x.numpy() for x in getattr(theirs, name)])
        np.testing.assert_allclose(getattr(ours, name), expected, atol=1e-4)
    expected = torch_model.compute_transition_scores(
        theirs.sequences, theirs.scores, theirs.beam_indices
    )
    got = model.compute_transition_scores(ours.sequences, ours.scores, ours.beam_indices)
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)


@pytest.fixture(scope="module")
def endless(model):
    """The same model without an end token."""
    config = model.config.replace(eos_token_id=None)
    return LlamaForCausalLM.create(config, seed=3)


def search(model, ids, size, groups=1, penalty=0.0):
    """Plain beam search of one row, by whole forwards and without an end; in Python floats."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def logprobs(state, ids, n):
        return jax.nn.log_softmax(nnx.merge(graphdef, state)(ids).logits[:, n - 1])

    k, n = size // groups, len(ids)
    running = [[(0.0, tuple(ids))] for _ in range(groups)]
    for length in range(n, n + NEW):
        said = np.zeros(V)
        for group in range(groups):
            beams = running[group]
            batch = np.zeros((size, n + NEW), int)
            for row, (_, tokens) in enumerate(beams):
                batch[row, :length] = tokens
            following = np.asarray(logprobs(state, batch, length), float)[: len(beams)]
            following -= penalty * said
            every = sorted(
                (
                    (score + float(following[row, token]), (*tokens, token))
                    for row, (score, tokens) in enumerate(beams)
                    for token in range(V)
                ),
                reverse=True,
            )
            running[group] = every[:k]
            for _, tokens in every[:k]:
                said[tokens[-1]] += 1
    best = sorted((beam for beams in running for beam in beams), reverse=True)
    return [tokens for _, tokens in best], [score / NEW for score, _ in best]


@pytest.mark.nightly
@pytest.mark.parametrize(("groups", "penalty"), [(1, 0.0), (2, 0.0), (2, 0.8)])
def test_groups_are_a_plain_search_in_turns(endless, prompt, groups, penalty):
    ids = prompt[0][:1]
    options = {"num_beam_groups": groups, "diversity_penalty": penalty} if groups > 1 else {}
    out = endless.generate(ids, num_beams=4, num_return_sequences=4, max_new_tokens=NEW, **options)
    tokens, scores = search(endless, ids[0], 4, groups, penalty)
    np.testing.assert_allclose(out.sequences_scores, scores, atol=1e-5)
    assert {tuple(row) for row in out.sequences} == set(tokens)
    if penalty == 0 or groups == 1:
        assert len(set(tokens)) == 4 // groups
    else:
        assert len(set(tokens)) == 4


@pytest.mark.nightly
def test_groups_end_each_for_itself(model, prompt):
    """Without diversity every group finds what beams of its size find alone."""
    ids, mask = prompt
    common = {"attention_mask": mask, "max_new_tokens": NEW, "early_stopping": True}
    alone = model.generate(ids, num_beams=2, num_return_sequences=2, **common)
    groups = model.generate(ids, num_beams=4, num_beam_groups=2, num_return_sequences=4, **common)
    np.testing.assert_array_equal(groups.sequences[::2], alone.sequences)
    np.testing.assert_array_equal(groups.sequences[1::2], alone.sequences)


@pytest.mark.nightly
def test_sampled_beams_are_reproducible_and_row_independent(endless, prompt):
    ids = prompt[0]
    options = {"do_sample": True, "num_beams": 3, "num_return_sequences": 3, "temperature": 2.0}
    options |= {"max_new_tokens": NEW, "output_scores": True, "top_k": 30}
    out = endless.generate(ids, **options, seed=1)
    again = endless.generate(ids, **options, seed=1)
    np.testing.assert_array_equal(out.sequences, again.sequences)
    other = endless.generate(ids, **options, seed=2)
    assert (out.sequences != other.sequences).any()
    # A row samples the same tokens alone, and its score is the sum of its tokens' scores.
    alone = endless.generate(ids[:1], **options, seed=1)
    np.testing.assert_array_equal(alone.sequences, out.sequences[:3])
    sums = endless.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    np.testing.assert_allclose(sums.sum(axis=1) / NEW, out.sequences_scores, atol=1e-5)


@pytest.mark.nightly
def test_rings_of_slots_follow_their_beams(prompt, tmp_path):
    """Layers with a window and layers without, against transformers."""
    torch = require_torch()
    from transformers import AutoModelForCausalLM

    config = Gemma2Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=4,
        query_pre_attn_scalar=8,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=None,
        initializer_range=0.6,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = Gemma2ForCausalLM.create(config, seed=0)
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="float32", attn_implementation="eager"
    ).eval()
    ids, mask = prompt
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW}
    out = model.generate(ids, attention_mask=mask, **options)
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor(ids), attention_mask=torch.tensor(mask), do_sample=False, **options
        )
    np.testing.assert_array_equal(out.sequences, expected.numpy())


@pytest.mark.nightly
def test_eight_devices_say_the_same(model, prompt):
    """Beams and drafts with rows, heads and parameters on several devices."""
    ids, mask = prompt
    config = model.config.replace(sharding_axis_dims=(1, 4, 1, 2, 1))
    sharded = LlamaForCausalLM.create(config, seed=3)
    common = {"attention_mask": mask, "max_new_tokens": NEW}
    for options in ({"num_beams": 4, "num_return_sequences": 4}, {"prompt_lookup_num_tokens": 3}):
        ours = sharded.generate(ids, **common, **options)
        expected = model.generate(ids, **common, **options)
        np.testing.assert_array_equal(ours.sequences, expected.sequences)
        if expected.sequences_scores is not None:
            np.testing.assert_allclose(ours.sequences_scores, expected.sequences_scores, atol=1e-5)
