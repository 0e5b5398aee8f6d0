"""Properties of the masks of masked language modeling, and of runs that use them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_data import train_bpe
from ed_infra.errors import ConfigError
from ed_infra.testing import english_topics
from ed_models.families.bert import BertConfig, BertForMaskedLM
from ed_trainers import arguments_class, trainer_class
from ed_trainers.losses.masking import Vocabulary, masked_rows, most_selected, word_begins
from method_runs import StopAt, near, near_reports, one_step, rows_of
from pydantic import ValidationError

ROWS, LENGTH = 8, 64
USUAL = (0.15, 0.8, 0.1)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(sorted(english_topics().values())[:20], 400, mask_token=True)


def packed(tokenizer, seed=0):
    """Rows of two documents that begin with a special token, and padding."""
    random = np.random.default_rng(seed)
    ids = random.integers(10, len(tokenizer), (ROWS, LENGTH)).astype(np.int32)
    cuts = random.integers(8, 40, (ROWS, 1))
    column = np.arange(LENGTH)
    segments = np.where(column < cuts, 1, 2).astype(np.int32)
    segments[:, 56:] = 0
    ids[(column == 0) | (column == cuts)] = tokenizer.bos_token_id
    return np.where(segments > 0, ids, tokenizer.pad_token_id).astype(np.int32), segments


def masked(tokenizer, ids, segments, *, weights=None, words=False, seed=(0, 1), p=USUAL):
    vocabulary = Vocabulary.of(tokenizer, whole_words=words)
    weights = np.ones(ids.shape, np.float32) if weights is None else weights
    return masked_rows(ids, segments, weights, vocabulary, probabilities=p, seed=seed)


def selected(rows, shape=(ROWS, LENGTH)):
    """Return where tokens are selected, bool [b, s]."""
    found = np.zeros(shape, bool)
    at, slots = np.nonzero(rows.weights)
    found[at, rows.positions[at, slots]] = True
    return found


@pytest.mark.parametrize("words", [False, True])
def test_special_tokens_padding_and_ignored_tokens_are_never_masked(tokenizer, words):
    ids, segments = packed(tokenizer)
    weights = np.ones(ids.shape, np.float32)
    weights[:, 20:25] = 0
    rows = masked(tokenizer, ids, segments, weights=weights, words=words, p=(1.0, 1.0, 0.0))
    forbidden = (segments == 0) | (weights == 0) | np.isin(ids, tokenizer.all_special_ids)
    found = selected(rows)
    np.testing.assert_array_equal(found, ~forbidden)
    np.testing.assert_array_equal(rows.input_ids[found], tokenizer.mask_token_id)
    np.testing.assert_array_equal(rows.input_ids[~found], ids[~found])


def test_targets_are_original_tokens_of_selected_positions(tokenizer):
    ids, segments = packed(tokenizer)
    rows = masked(tokenizer, ids, segments)
    at, slots = np.nonzero(rows.weights)
    np.testing.assert_array_equal(rows.targets[at, slots], ids[at, rows.positions[at, slots]])
    unchanged = ~selected(rows)
    np.testing.assert_array_equal(rows.input_ids[unchanged], ids[unchanged])


def test_shares_of_masked_random_and_unchanged_tokens_equal_their_probabilities(tokenizer):
    random = np.random.default_rng(0)
    ids = random.integers(10, len(tokenizer), (400, 512)).astype(np.int32)
    rows = masked(tokenizer, ids, np.ones_like(ids))
    found = selected(rows, ids.shape)
    allowed = ~np.isin(ids, tokenizer.all_special_ids)
    assert found.sum() / allowed.sum() == pytest.approx(0.15, abs=0.004)
    after = rows.input_ids[found]
    assert np.mean(after == tokenizer.mask_token_id) == pytest.approx(0.8, abs=0.01)
    assert np.mean(after == ids[found]) == pytest.approx(0.1, abs=0.01)


def test_mask_of_a_row_depends_on_seed_step_and_tokens_only(tokenizer):
    ids, segments = packed(tokenizer)
    whole = masked(tokenizer, ids, segments)
    for part in (slice(0, 3), slice(3, 8)):
        rows = masked(tokenizer, ids[part], segments[part])
        for name, array in rows._asdict().items():
            np.testing.assert_array_equal(array, getattr(whole, name)[part])
    for seed in ((1, 1), (0, 2)):
        other = masked(tokenizer, ids, segments, seed=seed)
        assert not np.array_equal(other.input_ids, whole.input_ids)


def test_whole_words_are_masked_completely(tokenizer):
    texts = [text[:300] for text in sorted(english_topics().values())[:8]]
    made = tokenizer(texts, return_offsets_mapping=True)
    for ids, offsets, text in zip(made["input_ids"], made["offset_mapping"], texts, strict=True):
        row = np.array([ids], np.int32)
        rows = masked(tokenizer, row, np.ones_like(row), words=True, p=(0.5, 1.0, 0.0))
        found = selected(rows, row.shape)[0]
        assert 0 < found.sum() < found.size
        for i in range(2, len(ids)):
            # Two tokens without a space between them belong to one word.
            gap = offsets[i - 1][1] != offsets[i][0]
            is_space = gap or any(text[j].isspace() for j in range(*offsets[i]))
            if not is_space:
                assert found[i] == found[i - 1], text[offsets[i - 1][0] : offsets[i][1]]


class WordPiece:
    """The attributes of a tokenizer that masking reads."""

    mask_token_id, all_special_ids = 1, [0, 1]
    tokens = ("[PAD]", "[MASK]", "un", "##believ", "##able", "cat", "Ġ", "##s")

    def __len__(self):
        return len(self.tokens)

    def convert_ids_to_tokens(self, ids):
        return [self.tokens[i] for i in ids]


def test_pieces_with_continuation_prefix_belong_to_the_word_before_them():
    begins = word_begins(WordPiece())
    assert begins.tolist() == [True, True, True, False, False, True, True, False]
    vocabulary = Vocabulary.of(WordPiece(), whole_words=True)
    ids = np.array([[2, 3, 4, 5, 7, 3, 4]], np.int32)
    segments = np.array([[1, 1, 1, 1, 1, 2, 2]], np.int32)
    words = vocabulary.words(ids, segments)
    assert words is not None
    assert words.tolist() == [[0, 0, 0, 1, 1, 2, 2]], "a document begins a word"


def test_tokenizer_without_mask_token_or_words_is_rejected(tokenizer):
    with pytest.raises(ConfigError, match="no mask token"):
        Vocabulary.of(train_bpe(["a b"], 259), whole_words=False)

    class Letters(WordPiece):
        tokens = ("a", "b", "c")

    with pytest.raises(ConfigError, match="whole_word_mask cannot find words"):
        Vocabulary.of(Letters(), whole_words=True)


def test_row_with_too_many_selected_tokens_keeps_whole_words():
    ids = np.array([[2, *[3, 4] * 10, 5, 7, 2, *[3, 4] * 10] * 2], np.int32)
    most = most_selected(ids.shape[1], 0.02, whole_words=True)
    vocabulary = Vocabulary.of(WordPiece(), whole_words=True)
    for step in range(300):
        rows = masked_rows(
            ids,
            np.ones_like(ids),
            np.ones(ids.shape, np.float32),
            vocabulary,
            probabilities=(0.02, 1.0, 0.0),
            seed=(0, step),
        )
        found = selected(rows, ids.shape)[0]
        assert found.sum() <= most
        begins = vocabulary.begins[ids[0]]
        assert all(found[i] == found[i - 1] for i in range(1, ids.size) if not begins[i])


def test_shares_above_one_are_rejected():
    with pytest.raises(ValidationError, match="their sum must be at most 1"):
        arguments_class("mlm")(mask_replace_prob=0.8, random_replace_prob=0.3)


def tiny(tokenizer, dims=(1, 1, 1, 1, 1), dropout=0.1):
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        sharding_axis_dims=dims,
    )
    return BertForMaskedLM.create(config, seed=0)


class Loader:
    """Packed rows, a pure function of the step."""

    steps_per_epoch, fingerprint = 3, "masked-rows"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def batch_at(self, step):
        ids, segments = packed(self.tokenizer, step % self.steps_per_epoch)
        return {"input_ids": ids, "segment_ids": segments}


def run(tokenizer, directory, **options):
    arguments = arguments_class("mlm")(
        save_directory=str(directory),
        total_batch_size=ROWS,
        max_training_steps=6,
        learning_rate=1e-2,
        log_steps=1,
        save_steps=2,
        evaluation_steps=3,
        use_tensorboard=False,
    )
    trainer = trainer_class("mlm")(
        arguments, tiny(tokenizer), Loader(tokenizer), Loader(tokenizer), tokenizer, **options
    )
    trainer.train()
    return trainer


@pytest.mark.nightly
def test_resumed_run_draws_the_same_masks_and_has_equal_losses(tokenizer, tmp_path):
    whole = run(tokenizer, tmp_path / "whole")
    run(tokenizer, tmp_path / "parts", callbacks=[StopAt(4)])
    run(tokenizer, tmp_path / "parts")
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    losses = [row["loss"] for row in rows_of(tmp_path / "whole") if "loss" in row]
    assert len({*losses}) == 6, "the masks of the steps are equal"
    first, again = whole.evaluate(), whole.evaluate()
    assert first == again
    assert first["eval_perplexity"] == pytest.approx(np.exp(first["eval_loss"]))


@pytest.mark.nightly
def test_microbatches_and_meshes_have_the_masks_of_the_whole_step(tokenizer):
    batch = Loader(tokenizer).batch_at(0)
    moved, report = one_step("mlm", tiny(tokenizer, dropout=0.0), batch, tokenizer=tokenizer)
    assert max(np.max(np.abs(x)) for x in jax.tree.leaves(moved)) > 1e-4
    for dims, parts in (((1, 1, 1, 1, 1), 4), ((2, 2, 1, 2, 1), 2)):
        model = tiny(tokenizer, dims, dropout=0.0)
        other, other_report = one_step("mlm", model, batch, parts, tokenizer=tokenizer)
        near(other, moved, 2e-5)
        near_reports(other_report, report, 2e-5)
