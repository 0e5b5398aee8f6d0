"""What `generate` returns with its options: several sequences, outputs, stop strings, programs."""

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.testing import require_torch
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.generation import assisted, beams, decoding
from ed_models.generation.token_choice import TokenChoice, process

V, S, NEW = 40, 9, 12


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.3,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return LlamaForCausalLM.create(config, seed=2)


@pytest.fixture(scope="module")
def torch_model(model, tmp_path_factory):
    require_torch()
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("options")
    model.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(0).integers(1, V, (2, S))


@pytest.mark.nightly
def test_several_sequences_of_a_prompt(model, prompt):
    options = {"do_sample": True, "temperature": 1.3, "seed": 3, "max_new_tokens": NEW}
    alone = model.generate(prompt, **options).sequences
    several = model.generate(prompt, **options, num_return_sequences=3).sequences
    assert several.shape == (6, S + NEW)
    np.testing.assert_array_equal(several[:, :S], np.repeat(prompt, 3, axis=0))
    np.testing.assert_array_equal(several[::3], alone)  # the first is what one alone would be
    assert len({tuple(row) for row in several}) == 6


@pytest.mark.nightly
def test_outputs_of_steps_are_hugging_faces(model, torch_model, prompt):
    import torch

    options = {
        "max_new_tokens": 5,
        "repetition_penalty": 1.4,
        "output_scores": True,
        "output_logits": True,
    }
    ours = model.generate(prompt, **options, output_logprobs=True)
    theirs = torch_model.generate(
        torch.tensor(prompt),
        attention_mask=torch.ones(prompt.shape),
        return_dict_in_generate=True,
        do_sample=False,
        **options,
    )
    np.testing.assert_array_equal(ours.sequences, theirs.sequences.numpy())
    for name in ("scores", "logits"):
        expected = np.stack([x.numpy() for x in getattr(theirs, name)])
        np.testing.assert_allclose(getattr(ours, name), expected, atol=1e-4)
    for normalize in (False, True):
        expected = torch_model.compute_transition_scores(
            theirs.sequences, theirs.scores, normalize_logits=normalize
        )
        got = model.compute_transition_scores(
            ours.sequences, ours.scores, normalize_logits=normalize
        )
        np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)
    # Log-probabilities are the model's own, before processing.
    new = ours.sequences[:, S:]
    logprobs = np.asarray(jax.nn.log_softmax(ours.logits))
    expected = np.take_along_axis(logprobs, new.T[:, :, None], axis=2)[..., 0].T
    np.testing.assert_allclose(ours.logprobs, expected, atol=1e-6)


@pytest.mark.nightly
def test_log_probabilities_stop_with_the_row(model, prompt):
    greedy = model.generate(prompt, max_new_tokens=NEW).sequences
    end = int(greedy[0, S + 2])
    out = model.generate(prompt, max_new_tokens=NEW, eos_token_id=end, output_logprobs=True)
    assert out.logprobs.shape == (2, out.sequences.shape[1] - S)
    stop = list(out.sequences[0, S:]).index(end)
    assert (out.logprobs[0, : stop + 1] < 0).all()
    assert not out.logprobs[0, stop + 1 :].any()


@pytest.mark.nightly
def test_processed_log_probabilities_are_those_of_the_draws(model, prompt):
    options = {"do_sample": True, "temperature": 0.6, "top_k": 9, "top_p": 0.8}
    out = model.generate(
        prompt,
        max_new_tokens=NEW,
        output_scores=True,
        output_logprobs=True,
        logprobs_mode="processed_logprobs",
        **options,
    )
    expected = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    np.testing.assert_allclose(out.logprobs, expected, atol=1e-5)
    raw = model.generate(prompt, max_new_tokens=NEW, output_logprobs=True, **options)
    np.testing.assert_array_equal(raw.sequences, out.sequences)
    assert np.abs(raw.logprobs - out.logprobs).max() > 0.01
    with pytest.raises(ConfigError, match="must be one of raw_logprobs, processed_logprobs"):
        model.generate(prompt, output_logprobs=True, logprobs_mode="processed")
    with pytest.raises(ConfigError, match="has no effect without output_logprobs"):
        model.generate(prompt, logprobs_mode="processed_logprobs")


class TestDistributions:
    """Chi-square: draws against probabilities; the filters themselves are compared elsewhere."""

    CHOICES = (
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 7},
        {"top_p": 0.8, "typical_p": 0.9},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in (
                {"min_p": 0.1, "temperature": 1.2},
                {"typical_p": 0.7},
                {"epsilon_cutoff": 0.03},
                {"eta_cutoff": 0.2},
            )
        ),
    )

    @staticmethod
    def p_value(draws, probs):
        """Of the draws, if the probabilities are right; rare tokens are counted together."""
        from scipy.stats import chi2  # the import takes a second

        order = np.argsort(-probs)
        counts, expected = np.bincount(draws, minlength=V)[order], (probs * len(draws))[order]
        assert not counts[expected == 0].any()
        common = max(int((expected >= 10).sum()), 1)
        pool = [[*x[:common], x[common:].sum()] for x in (counts, expected)]
        pool = np.asarray(pool)[:, np.asarray(pool[1]) > 0]
        statistic = ((pool[0] - pool[1]) ** 2 / pool[1]).sum()
        return chi2.sf(statistic, pool.shape[1] - 1)

    @pytest.mark.nightly
    @pytest.mark.parametrize("options", CHOICES)
    def test_sampled_tokens_follow_processed_distribution(self, model, prompt, options):
        """The first two tokens of many rows, through `generate`."""
        rows = np.repeat(prompt[:1], 4, axis=0)
        options = {"do_sample": True, "max_new_tokens": 2, **options}
        out = model.generate(rows, num_return_sequences=512, seed=11, **options)
        new = out.sequences[:, S:]
        logits = model(rows[:1]).logits[:, -1]
        choice = TokenChoice(**{k: v for k, v in options.items() if k != "max_new_tokens"})
        probs = np.asarray(jax.nn.softmax(process(logits, choice).spread()))[0]
        assert self.p_value(new[:, 0], probs) > 1e-3
        # The second, where the first was the likeliest.
        first = int(np.argmax(probs))
        logits = model(np.append(rows[:1], [[first]], axis=1)).logits[:, -1]
        probs = np.asarray(jax.nn.softmax(process(logits, choice).spread()))[0]
        assert self.p_value(new[new[:, 0] == first, 1], probs) > 1e-3

    @pytest.mark.nightly
    def test_drafts_do_not_change_sampled_distribution(self, model, prompt):
        """Also where the drafts are another model's: here one that is sure of other tokens."""
        rows = np.repeat(prompt[:1], 4, axis=0)
        options = {"do_sample": True, "max_new_tokens": 3, "num_return_sequences": 512, "seed": 1}
        other = LlamaForCausalLM.create(model.config, seed=9)
        drafted = model.generate(rows, **options, assistant_model=other, num_assistant_tokens=2)
        new = drafted.sequences[:, S:]
        for place in range(2):
            first = np.bincount(new[:, 0]).argmax()
            seen = new if place == 0 else new[new[:, 0] == first]
            before = rows[:1] if place == 0 else np.append(rows[:1], [[first]], axis=1)
            probs = np.asarray(jax.nn.softmax(model(before).logits[0, -1]))
            assert self.p_value(seen[:, place], probs) > 1e-3


class TestStopStrings:
    @pytest.fixture(scope="class")
    @staticmethod
    def tokenizer():
        """Letters, and some tokens of several."""
        from tokenizers import Tokenizer, decoders, models
        from transformers import PreTrainedTokenizerFast

        words = [*"abcdefghijklmnopqrstuvwxyz", "ab", "cd", "the", "in", "nd", "ing", "er", "tion"]
        words += ["<pad>", "an", "on", "is", "or", "st"]
        assert len(words) == V
        made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
        made.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")

    @pytest.mark.nightly
    def test_end_rows_where_hugging_face_ends_them(self, model, torch_model, prompt, tokenizer):
        import torch

        greedy = model.generate(prompt, max_new_tokens=NEW).sequences
        texts = ["".join(tokenizer.convert_ids_to_tokens(row[S:])) for row in greedy]
        stops = [texts[0][3:6], texts[1][5:9]]
        options = {"max_new_tokens": NEW, "stop_strings": stops, "tokenizer": tokenizer}
        pad = tokenizer.pad_token_id
        out = model.generate(prompt, **options, pad_token_id=pad, attention_mask=prompt >= 0)
        assert out.sequences.shape[1] < S + NEW
        for row, ids in enumerate(prompt):
            # In a batch without an end token, transformers continues rows until all have ended.
            theirs = torch_model.generate(
                torch.tensor(ids[None]),
                attention_mask=torch.ones(1, S),
                do_sample=False,
                pad_token_id=pad,
                **options,
            ).numpy()[0]
            np.testing.assert_array_equal(out.sequences[row, : len(theirs)], theirs)
            assert (out.sequences[row, len(theirs) :] == pad).all()
        again = model.generate(
            prompt,
            **options,
            pad_token_id=pad,
            attention_mask=prompt >= 0,
            prompt_lookup_num_tokens=3,
        )
        np.testing.assert_array_equal(again.sequences, out.sequences)

    @pytest.mark.nightly
    def test_end_beams_where_hugging_face_ends_them(self, model, torch_model, prompt, tokenizer):
        import torch

        options = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 3}
        best = model.generate(prompt, attention_mask=prompt >= 0, **options).sequences
        pieces = tokenizer.convert_ids_to_tokens(best[1, S:])
        pad = tokenizer.pad_token_id
        options |= {"stop_strings": pieces[3] + pieces[4], "tokenizer": tokenizer}
        out = model.generate(prompt, attention_mask=prompt >= 0, pad_token_id=pad, **options)
        theirs = torch_model.generate(
            torch.tensor(prompt),
            attention_mask=torch.ones(prompt.shape),
            return_dict_in_generate=True,
            output_scores=True,
            do_sample=False,
            pad_token_id=pad,
            **options,
        )
        np.testing.assert_allclose(out.sequences_scores, theirs.sequences_scores.numpy(), atol=1e-5)
        np.testing.assert_array_equal(out.beam_indices, theirs.beam_indices.numpy())
        for got, expected, new in zip(
            out.sequences, theirs.sequences.numpy(), out.beam_indices, strict=True
        ):
            # Without an end token transformers fills with -1, and here with the padding token.
            n = S + int((new >= 0).sum())
            np.testing.assert_array_equal(got[:n], expected[:n])
        assert out.steps < 7 or (out.beam_indices == -1).any()

    @pytest.mark.nightly
    def test_the_string_may_begin_in_the_prompt(self, model, prompt, tokenizer):
        greedy = model.generate(prompt[:1], max_new_tokens=3).sequences
        pieces = tokenizer.convert_ids_to_tokens(greedy[0])
        stop = pieces[S - 1] + pieces[S][:1]
        out = model.generate(prompt[:1], max_new_tokens=3, stop_strings=stop, tokenizer=tokenizer)
        assert out.sequences.shape == (1, S + 1)

    def test_invalid_stop_strings_raise_config_error(self, model, prompt, tokenizer):
        with pytest.raises(ConfigError, match="pass the model's tokenizer"):
            model.generate(prompt, stop_strings="a")
        with pytest.raises(ConfigError, match="it must be a string, or several"):
            model.generate(prompt, stop_strings=[""], tokenizer=tokenizer)
        with pytest.raises(ConfigError, match="65 strings of up to 1 characters"):
            model.generate(prompt, stop_strings=["a"] * 65, tokenizer=tokenizer)
        with pytest.raises(ConfigError, match="tokenizer has no effect without stop_strings"):
            model.generate(prompt, tokenizer=tokenizer)


@pytest.mark.nightly
def test_functions_of_the_caller_are_traced_once(model, prompt):
    calls = []

    def even(input_ids, scores):
        calls.append(input_ids.shape)
        return scores.at[:, 1::2].set(-np.inf)

    for cut in (3, 5, S):
        out = model.generate(prompt[:, :cut], max_new_tokens=4, logits_processor=[even])
        assert not (out.sequences[:, cut:] % 2).any()
    assert len(calls) == 2  # the token behind the prompt, and the loop


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (decoding, {"output_scores": True, "no_repeat_ngram_size": 3}),
        (beams, {"num_beams": 3, "num_return_sequences": 2}),
        (assisted, {"prompt_lookup_num_tokens": 2}),
    ],
)
def test_lengths_and_numbers_share_programs(model, prompt, monkeypatch, module, options):
    """Other lengths within the buckets, and other numbers, compile nothing."""
    traces, wrapped = [], module.process

    def counted(*args, **kwargs):
        traces.append(1)
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(module, "process", counted)
    numbers = {"repetition_penalty": 1.1} | ({"length_penalty": 1.0} if module is beams else {})
    model.generate(prompt[:, :3], max_new_tokens=4, **options, **numbers)
    first = len(traces)
    assert first > 0
    for cut, new in ((5, 16), (S, 9)):
        numbers = {name: value + 0.4 for name, value in numbers.items()}
        model.generate(prompt[:, :cut], max_new_tokens=new, **options, **numbers)
    assert len(traces) == first
    model.generate(prompt, max_new_tokens=17, **options, **numbers)  # more room
    assert len(traces) > first


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_return_sequences": 2}, "would be 2 times the same row; pass do_sample=True"),
            ({"num_beams": 2, "num_return_sequences": 3}, "=3 is larger than num_beams"),
            ({"length_penalty": 0.5}, "length_penalty has no effect without num_beams"),
            ({"length_penalty": 0.5, "num_beams": 1}, "has no effect without num_beams"),
            ({"early_stopping": True}, "early_stopping has no effect without num_beams"),
            ({"early_stopping": "soon", "num_beams": 2}, "it must be True, False or 'never'"),
            ({"num_beams": 4, "num_beam_groups": 3}, "do not divide into num_beam_groups=3"),
            ({"num_beams": 4, "diversity_penalty": 1.0}, "without num_beam_groups"),
            ({"num_beams": 0}, "num_beams is 0; it must be a whole number of at least 1"),
            ({"num_beams": 2, "output_logprobs": True}, "does not support beams"),
            ({"min_new_tokens": 3}, "has no effect on rows that no token ends"),
            ({"min_length": 3}, "has no effect on rows that no token ends"),
            ({"min_new_tokens": 9, "max_new_tokens": 8, "eos_token_id": 1}, "at least 9 new"),
            ({"typical_p": 0.5}, "typical_p has no effect in greedy decoding"),
            ({"suppress_tokens": [V]}, "suppress_tokens has token 40, but .* 40 tokens"),
            ({"bad_words_ids": [[1, V + 3]]}, "bad_words_ids has token 43"),
            ({"use_cache": False}, "use_cache is False; it must be True, or left out"),
            ({"return_dict_in_generate": False}, "the tokens are its sequences"),
            ({"forced_bos_token_id": 1, "begin_suppress_tokens": [2]}, "omit one of them"),
            ({"num_beems": 2}, "num_beems=2, which generate .* did you mean 'num_beams'"),
            ({"streamer": 1}, "generate got streamer=1, which generate does not support"),
        ],
    )
    def test_contradictory_generate_options_raise_config_error(
        self, model, prompt, options, message
    ):
        with pytest.raises(ConfigError, match=message):
            model.generate(prompt, **options)

    def test_more_output_than_memory_should_hold(self, model, prompt):
        options = {"do_sample": True, "num_return_sequences": 1024, "output_scores": True}
        rows = np.repeat(prompt, 400, axis=0)
        with pytest.raises(ConfigError, match=r"GiB for up to 64 steps; at most 4 GiB are kept"):
            model.generate(rows, max_new_tokens=50, **options)


@pytest.mark.nightly
def test_length_limits_include_the_prompt(model, prompt):
    """As transformers has it: `min_length` and `max_length` include the prompt."""
    end = int(model.generate(prompt, max_new_tokens=1).sequences[0, S])
    options = {"eos_token_id": end, "max_length": S + 6}
    assert model.generate(prompt[:1], **options).sequences.shape == (1, S + 1)
    held = model.generate(prompt[:1], **options, min_length=S + 3).sequences
    assert end not in held[0, S : S + 3]
    same = model.generate(prompt[:1], **options, min_new_tokens=3).sequences
    np.testing.assert_array_equal(held, same)


@pytest.mark.nightly
@pytest.mark.proves("prepare_inputs_for_generation")
def test_prepare_inputs_for_generation_ignores_padding(model, prompt):
    padded = np.pad(prompt, ((0, 0), (3, 0)))
    inputs = model.prepare_inputs_for_generation(padded, 32, pad_token_id=0)
    np.testing.assert_array_equal(inputs["position_ids"][:, 3:], [np.arange(S)] * len(prompt))
    out = model(padded, **inputs)
    assert out.past_key_values.tokens.tolist() == [S, S]
    np.testing.assert_allclose(out.logits[:, -1], model(prompt).logits[:, -1], atol=1e-5)
