"""Tokens on disk: equal to the tokenizer's, cached, and written again after changes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from ed_data import DataError, Tokenization
from ed_data.cache import new_file, new_folder
from ed_data.rows.example import Example
from ed_data.storage.prepare import prepare_tokens
from ed_data.storage.store import TokenStore, write_store
from ed_data.tokens.encoded import EncodedDocuments
from ed_data.tokens.encoder import Encoder
from ed_data.tokens.parallel import Encoding

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]


def document(content) -> Example:
    return Example({"content": content})


def encoder_of(tokenizer, eos=None, **options) -> Encoder:
    return Encoder.create(tokenizer, Tokenization(**options), eos)


def encoding_of(tokenizer, **options) -> Encoding:
    return Encoding(encoder_of(tokenizer, **options))


def tokens_of(parts) -> list[list[int]]:
    store = parts[0].tokens
    numbers = np.arange(len(store.hashes))
    lengths = store.lengths(numbers)
    flat, _ = store.gather(numbers, np.zeros_like(numbers), lengths)
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("on_the_fly", [False, True])
def test_tokens_equal_those_of_the_tokenizer_with_eos(mixture, tokenizer, on_the_fly):
    texts = ["one", "two sheep", "and goats"]
    options = mixture(texts, pack_on_the_fly=on_the_fly, tokenization={"batch_size": 2})
    parts = prepare_tokens(
        options, encoding_of(tokenizer, batch_size=2), "train", options.cache_dir
    )
    expected = [[*tokenizer(t)["input_ids"], tokenizer.eos_token_id] for t in texts]
    assert tokens_of(parts) == expected
    assert Path(options.cache_dir).exists() != on_the_fly


def test_pieces_of_documents_can_be_read_separately(mixture, tokenizer):
    options = mixture(["one two three", "four five"])
    for on_the_fly in (False, True):
        given = options.replace(pack_on_the_fly=on_the_fly)
        parts = prepare_tokens(given, encoding_of(tokenizer), "train", options.cache_dir)
        whole = tokens_of(parts)
        found, _ = parts[0].tokens.gather(np.array([1, 0]), np.array([2, 1]), np.array([1, 3]))
        assert found.tolist() == whole[1][2:3] + whole[0][1:4]


def test_encoder_applies_special_token_and_eos_options(mixture, tokenizer):
    plain = encoder_of(tokenizer, add_special_tokens=False).encode([document("ab")], "x")[0][0]
    assert plain.tolist() == [
        *tokenizer("ab", add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    assert encoder_of(tokenizer, eos=7).encode([document("ab")], "x")[0][0][-1] == 7
    ids = encoder_of(tokenizer).encode([document([5, 6])], "x")[0][0]
    assert ids.tolist() == [5, 6, tokenizer.eos_token_id]
    ended = encoder_of(tokenizer, eos=6).encode([document([5, 6])], "x")[0][0]
    assert ended.tolist() == [5, 6]


def test_truncation_setting_of_the_tokenizer_is_ignored(tokenizer):
    before = encoder_of(tokenizer)
    whole, fingerprint = before.encode([document("sheep and goats")], "x")[0][0], before.fingerprint
    tokenizer("sheep and goats", truncation=True, max_length=3)
    after = encoder_of(tokenizer)
    assert after.fingerprint == fingerprint
    assert after.encode([document("sheep and goats")], "x")[0][0].tolist() == whole.tolist()


def test_chat_messages_are_rendered_with_the_template(tokenizer):
    ids, masks, *_ = encoder_of(tokenizer).encode([document("text"), document(CHAT)], "x")
    assert masks is None
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(ids[1]) == text  # the ids end with the end token, so none is added
    assert ids[0].tolist() == [*tokenizer("text")["input_ids"], tokenizer.eos_token_id]


def test_assistant_only_loss_masks_other_turns(tokenizer):
    encoder = encoder_of(tokenizer, assistant_only_loss=True)
    ids, masks, *_ = encoder.encode([document(CHAT), document("text")], "x")
    assert masks is not None
    answers = tokenizer.decode(ids[0][masks[0].astype(bool)])
    assert answers == "hello there<|eos|>so long<|eos|>"
    assert masks[1].all()  # a plain text has no turns, so all of it has loss


def test_answer_mask_works_without_template_generation_marks(tokenizer):
    """The mask equals that of marks; space after the end token of a turn has no loss."""
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = re.sub(r"{%-? (end)?generation -?%}", "", tokenizer.chat_template)
    assert bare.chat_template != tokenizer.chat_template
    (ids,), (mask,), *_ = encoder_of(bare, assistant_only_loss=True).encode([document(CHAT)], "x")
    (want,), (known,), *_ = encoder_of(tokenizer, assistant_only_loss=True).encode(
        [document(CHAT)], "x"
    )
    assert ids.tolist() == want.tolist()
    assert mask.tolist() == known.tolist()

    bare.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|eos|>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    (ids,), (mask,), *_ = encoder_of(bare, assistant_only_loss=True).encode([document(CHAT)], "x")
    assert bare.decode(ids[mask.astype(bool)]) == "hello there<|eos|>so long<|eos|>"


#: Renders messages in order; the last answer has reasoning, or earlier answers are changed.
REWRITING = (
    "{% for m in messages %}{{ m.role }}: {% if loop.last and m.role == 'assistant' %}"
    "<think></think>{% endif %}CONTENT<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_answers_are_located_if_template_removes_earlier_reasoning(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = REWRITING.replace("CONTENT", "{{ m.content }}")
    encoder = encoder_of(bare, assistant_only_loss=True)
    (ids,), (mask,), *_ = encoder.encode([document(CHAT[:2])], "x")
    assert bare.decode(ids[mask.astype(bool)]) == "<think></think>hello there<|eos|>"
    (ids,), (mask,), *_ = encoder.encode([document(CHAT)], "x")
    assert bare.decode(ids[mask.astype(bool)]) == "hello there<|eos|><think></think>so long<|eos|>"


def test_template_that_changes_earlier_turns_must_mark_answers(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = REWRITING.replace(
        "CONTENT", "{{ m.content if loop.last else m.content | upper }}"
    )
    with pytest.raises(DataError, match=r"differently if other mess.*\{% generation %\}"):
        encoder_of(bare, assistant_only_loss=True).encode([document(CHAT)], "x")


def test_missing_tokenizer_features_raise_data_error(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encoder_of(bare).encode([document(CHAT)], "x")
    with pytest.raises(DataError, match="requires a chat template, but the tokenizer has none"):
        encoder_of(bare, assistant_only_loss=True)
    bare.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(DataError, match="no such role"):
        encoder_of(bare).encode([document(CHAT)], "x")
    bare.eos_token = None
    with pytest.raises(DataError, match="pack_eos_token_id"):
        encoder_of(bare)
    with pytest.raises(DataError, match=f"0 to {len(tokenizer) - 1}"):
        encoder_of(tokenizer, eos=len(tokenizer))
    with pytest.raises(DataError, match="token id 99999"):
        encoder_of(tokenizer).encode([document([3, 99999])], "x")


def test_encoding_error_names_the_row(mixture, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template += "{% if not messages[1:] %}{{ raise_exception('short') }}{% endif %}"

    def error_of(rows) -> str:
        options = mixture(rows)
        with pytest.raises(DataError) as error:
            prepare_tokens(options, encoding_of(tokenizer), "train", options.cache_dir)
        assert error.value.path == ("informs", 0)
        return str(error.value)

    text = error_of([{"content": t} for t in ("good", "half of a \ud800 pair", "good")])
    assert "data.jsonl:2, content_field: the tokenizer cannot encode the text" in text
    text = error_of([{"content": CHAT}, {"content": CHAT}, {"content": CHAT[:1]}])
    assert (
        "data.jsonl:3, content_field: the chat template cannot render the messages: short" in text
    )
    assert "drop it in format_callback" in text
    assert "data.jsonl:2, content_field: token id -1" in error_of(
        [{"content": [1]}, {"content": [-1, 2]}]
    )


def test_token_cache_is_keyed_by_data_and_tokenization(mixture, tokenizer, jsonl, tmp_path):
    def stores_after(options) -> int:
        encoder = encoder_of(tokenizer, eos=options.pack_eos_token_id)
        prepare_tokens(options, Encoding(encoder), "train", options.cache_dir)
        return len(list((tmp_path / "cache" / "tokens").iterdir()))

    made = mixture(["one", "two"])
    assert stores_after(made) == 1
    assert stores_after(made.replace(seed=3, pack_seq_length=32)) == 1  # other rows, same tokens
    assert stores_after(made.replace(pack_eos_token_id=5)) == 2
    limited = made.informs[0].replace(num_rows=1)
    assert stores_after(made.replace(informs=[limited])) == 3
    jsonl(["one", "three"])
    assert stores_after(made) == 4


def test_second_loader_reads_tokens_from_the_cache(mixture, tokenizer, monkeypatch):
    made = mixture()
    first = tokens_of(prepare_tokens(made, encoding_of(tokenizer), "train", made.cache_dir))
    monkeypatch.setattr(Encoder, "encode", None)
    assert tokens_of(prepare_tokens(made, encoding_of(tokenizer), "train", made.cache_dir)) == first


def test_closure_values_of_a_function_change_the_cache(mixture, tokenizer, jsonl):
    def add(what):
        return lambda text: text + what

    def run(what):
        informs = [{"data_files": jsonl(["a"]), "preprocessing_fn": add(what)}]
        made = mixture(informs=informs)
        return tokens_of(prepare_tokens(made, encoding_of(tokenizer), "train", made.cache_dir))

    assert run("x") != run("y")


def test_broken_store_is_written_again(mixture, tokenizer, tmp_path, caplog):
    made = mixture()
    first = tokens_of(prepare_tokens(made, encoding_of(tokenizer), "train", made.cache_dir))
    (store,) = (tmp_path / "cache" / "tokens").iterdir()
    with open(store / "tokens.bin", "r+b") as stream:
        stream.truncate(100)
    assert tokens_of(prepare_tokens(made, encoding_of(tokenizer), "train", made.cache_dir)) == first
    assert "truncated" in caplog.text


def test_store_is_written_atomically(tmp_path):
    def batches():
        yield EncodedDocuments([np.array([1, 2])], None, [11])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "s", batches(), vocab_size=10, encoder="e", about={})
    assert list(tmp_path.iterdir()) == []


def test_concurrent_writers_keep_one_store(tmp_path):
    def batches(inner):
        yield EncodedDocuments([np.array([1, 2])], None, [11])
        if inner:
            write_store(tmp_path / "s", batches(False), vocab_size=10, encoder="e", about={})

    store = write_store(tmp_path / "s", batches(True), vocab_size=10, encoder="e", about={})
    assert store.lengths(np.array([0])).tolist() == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_token_ids_use_smallest_sufficient_dtype(tmp_path, vocab_size, dtype):
    batch = EncodedDocuments([np.array([vocab_size - 1])], None, [1])
    store = write_store(tmp_path / "s", [batch], vocab_size=vocab_size, encoder="e", about={})
    assert json.loads((tmp_path / "s" / "meta.json").read_text())["dtype"] == dtype
    found, _ = store.gather(np.array([0]), np.array([0]), np.array([1]))
    assert found.tolist() == [vocab_size - 1]


def test_folder_without_a_store_raises_data_error(tmp_path):
    with pytest.raises(DataError, match="not a complete token store"):
        TokenStore(tmp_path)


def test_files_left_by_killed_process_are_deleted(tmp_path):
    """Parts that another process is writing, and other files in the folder, are kept."""
    old, abandoned = tmp_path / ".s.1.aa.part", tmp_path / ".other.2.bb.part"
    for folder in (old, abandoned):
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(b"x")
    file = tmp_path / ".rows-0.bin.cc.part"
    file.touch()
    (tmp_path / "kept").mkdir()
    batch = EncodedDocuments([np.array([1])], None, [1])
    with new_folder(tmp_path / "t") as young, new_file(tmp_path / "f") as writing:
        (young / "tokens.bin").write_bytes(b"x")
        write_store(tmp_path / "s", [batch], vocab_size=10, encoder="e", about={})
        assert not old.exists() and not abandoned.exists() and not file.exists()
        assert (young / "tokens.bin").exists() and writing.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "kept", "s"]


def test_without_locks_parts_older_than_a_day_are_deleted(tmp_path, monkeypatch):
    import os

    monkeypatch.setattr("ed_data.cache.fcntl", None)
    old, young = tmp_path / ".s.1.aa.part", tmp_path / ".s.2.bb.part"
    for folder in (old, young):
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(b"x")
    for path in (old / "tokens.bin", old):
        os.utime(path, (0, 0))
    batch = EncodedDocuments([np.array([1])], None, [1])
    write_store(tmp_path / "s", [batch], vocab_size=10, encoder="e", about={})
    assert not old.exists()
    assert young.exists()


def test_tokenizer_class_with_custom_encoding_is_called(tokenizer):
    class Shouting(type(tokenizer)):
        def _encode_plus(self, text, *args, **options):
            text = [t.upper() for t in text] if isinstance(text, list) else text.upper()
            return super()._encode_plus(text, *args, **options)

    own = Shouting(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|eos|>")
    ids = encoder_of(own, eos=1).encode([document("ab")], "x")[0][0]
    plain = encoder_of(tokenizer, eos=1).encode([document("AB")], "x")[0][0]
    assert ids.tolist() == plain.tolist()
