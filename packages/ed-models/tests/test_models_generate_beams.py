"""Beam search against `transformers`: tokens, scores and where each token came from."""

import numpy as np
import pytest
from ed_infra.testing import require_torch
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

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


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.5, 2.0])
def test_tokens_and_scores_are_hugging_faces(
    model, torch_model, prompt, early_stopping, length_penalty
):
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    ours, theirs = both(model, torch_model, prompt, num_beams=4, num_return_sequences=3, **options)
    agree(ours, theirs)
    assert ours.sequences.shape[0] == 6
    assert (ours.sequences[:, S:] == END).any()  # some ended


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2, "eos_token_id": [END, 11, 12]},
        {"num_beams": 3, "eos_token_id": [END, 11], "min_new_tokens": 5, "max_new_tokens": 6},
        {"num_beams": 4, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        {"num_beams": 3, "bad_words_ids": [[5], [9, 4]], "renormalize_logits": True},
        {"num_beams": 4, "max_new_tokens": 1},
        {"num_beams": 5, "forced_eos_token_id": END, "length_penalty": 0.5},
    ],
)
def test_other_options_go_with_beams(model, torch_model, prompt, options):
    ours, theirs = both(model, torch_model, prompt, **options)
    agree(ours, theirs)


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


def test_without_an_end_all_beams_reach_the_limit(model, torch_model, prompt):
    import torch

    ids, mask = prompt
    common = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW}
    ours = model.generate(ids, attention_mask=mask, eos_token_id=[], **common)
    torch_model.generation_config.eos_token_id, before = None, END
    theirs = torch_model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=PAD,
        **common,
    )
    torch_model.generation_config.eos_token_id = before
    agree_tokens = theirs.sequences.numpy()
    np.testing.assert_array_equal(ours.sequences, agree_tokens)
