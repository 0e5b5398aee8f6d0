"""The schema of documents, and the orders of batches: preference pairs, a streamed order."""

from __future__ import annotations

import ast
import itertools
import json
import pickle
import re
from pathlib import Path

import ed_data
import numpy as np
import pytest
from ed_data import (
    Column,
    DataError,
    Inform,
    Schema,
    StreamLoader,
    build_loader,
    contents,
    documents,
    texts,
)
from ed_data.batches.arrays import BatchLayout
from ed_data.kinds import ROW_KINDS
from ed_data.order.mixing import IntArray
from ed_data.order.windows import PlannedRows
from ed_data.rows.example import Example
from ed_data.schema import CLASSIFICATION, PREFERENCE, TEXT
from ed_data.storage.lazy import LazyTokens
from ed_data.tokens.encoder import Encoder
from ed_data.tokens.parallel import Encoding

PAIRS = [
    {
        "prompt": f"How much is {i}? " + "Answer. " * (i % 3),
        "chosen": f"It is {i}" + ", a number" * (i % 5),
        "rejected": "No" + " idea" * (i % 4),
    }
    for i in range(40)
]
KEYS = ("input_ids", "labels", "segment_ids", "position_ids")


def chat(*turns: str) -> list[dict[str, str]]:
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]


def pair_of(tokenizer, row, side: str) -> tuple[list[int], list[int]]:
    """Return tokens and labels of one answer from direct calls of the tokenizer."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    answer = tokenizer(row[side], add_special_tokens=False)["input_ids"]
    answer = [*answer, tokenizer.eos_token_id]
    return [*prompt, *answer], [*[-100] * len(prompt), *answer]


def segments(batch, side: str) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Return a mapping from (row, segment) to tokens and labels."""
    numbers = batch[f"{side}_segment_ids"]
    return {
        (row, int(n)): tuple(
            batch[f"{side}_{key}"][row][numbers[row] == n].tolist() for key in KEYS[:2]
        )
        for row in range(len(numbers))
        for n in range(1, numbers[row].max() + 1)
    }


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("on_the_fly", [True, False])
def test_pairs_share_rows_and_segments(mixture, tokenizer, packed, on_the_fly):
    made = mixture(
        PAIRS,
        pack_tokens=packed,
        pack_on_the_fly=on_the_fly,
        tokenization={"max_length": 128},
        pack_seq_length=128,
    )
    loader = build_loader(made, tokenizer, batch_size=4, schema=PREFERENCE)
    seen = []
    for step in range(-(-loader.stats["rows"] // 4)):
        batch = loader.batch_at(step)
        assert sorted(batch) == sorted(f"{s}_{key}" for s in ("chosen", "rejected") for key in KEYS)
        assert {values.shape for values in batch.values()} == {(4, 128)}
        chosen, rejected = segments(batch, "chosen"), segments(batch, "rejected")
        assert chosen.keys() == rejected.keys()
        seen += [(chosen[key], rejected[key]) for key in chosen]
    expected = [
        (pair_of(tokenizer, row, "chosen"), pair_of(tokenizer, row, "rejected")) for row in PAIRS
    ]
    assert all(pair in expected for pair in seen)
    assert all(pair in seen for pair in expected)
    assert (loader.stats["fill"] > 0.6) == packed


def test_pairs_are_truncated_and_never_split(mixture, tokenizer):
    for packed in (True, False):
        made = mixture(PAIRS, pack_tokens=packed, pack_seq_length=24)
        loader = build_loader(made, tokenizer, batch_size=8, seq_length=24, schema=PREFERENCE)
        batches = [loader.batch_at(step) for step in range(-(-loader.stats["rows"] // 8))]
        pieces = [s for b in batches for s in segments(b, "chosen").values()]
        whole = [pair_of(tokenizer, row, "chosen")[0][:24] for row in PAIRS]
        assert all(tokens in whole for tokens, _ in pieces)
        assert loader.stats["tokens_cut"] > 0
    with pytest.raises(DataError, match=r"never split: use 'bfd'") as error:
        build_loader(mixture(PAIRS, pack_strategy="wrapped"), tokenizer, schema=PREFERENCE)
    assert error.value.path == ("pack_strategy",)
    split = mixture(PAIRS, tokenization={"truncation": False})
    with pytest.raises(DataError, match="never split over rows") as error:
        build_loader(split, tokenizer, schema=PREFERENCE)
    assert error.value.path == ("tokenization", "truncation")


def test_pairs_may_be_messages_or_ids(mixture, tokenizer):
    rows = [
        {
            "prompt": chat("hi"),
            "chosen": [{"role": "assistant", "content": "hello"}],
            "rejected": "x",
        },
        {"prompt": "hi", "chosen": [{"role": "assistant", "content": "hello"}], "rejected": "x"},
        {"prompt": [5, 6], "chosen": [7, 8], "rejected": [9]},
        {"prompt": "", "chosen": "left", "rejected": "right"},
    ]
    made = mixture(rows, pack_tokens=False, shuffle_buffer_size=0)
    loader = build_loader(
        made, tokenizer, batch_size=4, seq_length=64, schema=PREFERENCE, shuffle=False
    )
    batch = loader.batch_at(0)
    chosen, rejected = segments(batch, "chosen"), segments(batch, "rejected")
    eos = tokenizer.eos_token_id
    for row in (0, 1):
        tokens, labels = chosen[row, 1]
        assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(
            chat("hi", "hello"), tokenize=False
        )
        assert tokenizer.decode([t for t in labels if t != -100]) == "hello<|eos|>"
        labels = rejected[row, 1][1]
        assert tokenizer.decode([t for t in labels if t != -100]) == "x<|eos|>"
    assert chosen[2, 1] == ([5, 6, 7, 8, eos], [-100, -100, 7, 8, eos])
    assert rejected[2, 1] == ([5, 6, 9, eos], [-100, -100, 9, eos])
    assert tokenizer.decode(chosen[3, 1][0]) == "<|bos|>left<|eos|>"


@pytest.mark.proves("mixture.informs.content_field")
def test_content_field_names_the_prompt(mixture, tokenizer, jsonl):
    """EasyDeL documents `content_field: prompt, additional_fields: [chosen, rejected]`."""
    renamed = [{**row, "question": row["prompt"]} for row in PAIRS]
    for row in renamed:
        del row["prompt"]
    informs = [
        {
            "data_files": jsonl(renamed),
            "content_field": "question",
            "additional_fields": ["chosen", "rejected"],
        }
    ]
    first = build_loader(mixture(informs=informs), tokenizer, batch_size=4, schema=PREFERENCE)
    plain = build_loader(mixture(PAIRS), tokenizer, batch_size=4, schema=PREFERENCE)
    for key, values in plain.batch_at(3).items():
        assert np.array_equal(values, first.batch_at(3)[key])


def test_pairs_of_one_prompt_are_held_out_together(mixture, tokenizer):
    rows = [{**row, "prompt": f"prompt {i // 4}"} for i, row in enumerate(PAIRS)]
    made = mixture(rows, eval_fraction=0.3)
    train = set(contents(made, schema=PREFERENCE))
    held = set(contents(made, "eval", schema=PREFERENCE))
    assert len(train) + len(held) == 10
    assert not train & held
    evaluation = build_loader(made, tokenizer, split="eval", schema=PREFERENCE)
    assert evaluation.stats["documents"] == 4 * len(held)
    assert "No" in set(texts(made, "eval", schema=PREFERENCE)) | set(texts(made, schema=PREFERENCE))


def test_changed_answers_change_the_fingerprint(mixture, tokenizer):
    state = build_loader(mixture(PAIRS), tokenizer, schema=PREFERENCE).state_dict()
    changed = [{**PAIRS[0], "rejected": "other"}, *PAIRS[1:]]
    with pytest.raises(DataError, match=r"data\.sources\.0:data"):
        build_loader(mixture(changed), tokenizer, schema=PREFERENCE).load_state_dict(state)
    prompts = [{"prompt": row["prompt"]} for row in PAIRS]
    text = mixture(prompts)
    text = mixture(informs=[text.informs[0].replace(content_field="prompt")])
    with pytest.raises(DataError, match="tokenizer"):
        build_loader(text, tokenizer).load_state_dict(state)


def test_pair_without_an_answer_is_dropped_or_raises_error(mixture, tokenizer):
    rows = [*PAIRS[:3], {**PAIRS[3], "rejected": " "}]
    assert build_loader(mixture(rows), tokenizer, schema=PREFERENCE).stats["documents"] == 3
    rows = [*PAIRS[:3], {"prompt": "p", "chosen": "c", "reject": "r"}]
    with pytest.raises(DataError, match=r"data\.jsonl:4: there is no field 'rejected'.*'reject'"):
        build_loader(mixture(rows), tokenizer, schema=PREFERENCE)
    rows = [*PAIRS[:3], {"prompt": "p", "chosen": [1, 2], "rejected": "r"}]
    with pytest.raises(DataError, match=r"data\.jsonl:4, 'chosen'.*ids and text"):
        build_loader(mixture(rows), tokenizer, schema=PREFERENCE)


def test_saved_preference_rows_contain_pairs_and_rejected_ids(mixture, tokenizer, tmp_path):
    made = mixture(PAIRS, pack_tokens=False, save={"path": tmp_path / "out", "format": "json"})
    build_loader(made, tokenizer, seq_length=64, schema=PREFERENCE)
    line = (tmp_path / "out" / "train-00000-of-00001.jsonl").read_text().splitlines()[7]
    row = json.loads(line)
    assert {key: row[key] for key in PAIRS[7]} == PAIRS[7]
    assert row["rejected_input_ids"] == pair_of(tokenizer, PAIRS[7], "rejected")[0]


def test_custom_schema_masks_prompt_in_one_column(mixture, tokenizer):
    """Only the completion of a prompt has loss."""
    schema = Schema((Column("", "chosen", "prompt"),), "prompt")
    loader = build_loader(mixture(PAIRS, pack_seq_length=256), tokenizer, schema=schema)
    batch = loader.batch_at(0)
    learned = tokenizer.decode(batch["labels"][batch["labels"] != -100])
    assert "It is" in learned
    assert "What" not in learned
    for wrong in ((), (Column("a", "content"), Column("a", "content"))):
        with pytest.raises(DataError, match="different names"):
            Schema(wrong)
    with pytest.raises(DataError, match="reads the content"):
        Schema((Column("", "text"),))


class Counted:
    """A streamed order with next-fit packing, whose state is the number of documents read."""

    def __init__(self, tokens: LazyTokens, size: int) -> None:
        self.tokens, self.size, self.read = tokens, size, 0

    def __next__(self) -> PlannedRows:
        documents: list[int] = []
        used = 0
        while self.read < len(self.tokens.hashes):
            length = int(self.tokens.lengths(np.array([self.read]))[0])
            if used + length > self.size:
                break
            documents.append(self.read)
            used, self.read = used + length, self.read + 1
        if not documents:
            raise StopIteration
        which: IntArray = np.array(documents)
        zeros = np.zeros_like(which)
        lengths = self.tokens.lengths(which)
        numbers = np.arange(1, len(which) + 1)
        return PlannedRows([self.tokens], zeros, which, zeros, lengths, zeros, numbers)

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


def stream(tokenizer, size: int = 64, **details) -> StreamLoader:
    encoder = Encoder(tokenizer, True, tokenizer.eos_token_id, False, 100, TEXT)
    documents = [Example({"content": f"number {i} " + "sheep " * (i % 5)}) for i in range(30)]
    order = Counted(LazyTokens(documents, Encoding(encoder), "x"), size)
    return StreamLoader(order, BatchLayout(1, size, 0), {"size": size, **details})


def test_streamed_prompts_resume_from_saved_state(tokenizer):
    whole = list(stream(tokenizer))
    text = "".join(tokenizer.decode(b["input_ids"][b["segment_ids"] > 0]) for b in whole)
    assert [f"number {i} " in text for i in range(30)] == [True] * 30
    for stop in (0, 3, len(whole) - 1):
        first = stream(tokenizer)
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.state_dict()))
        second = stream(tokenizer)
        second.load_state_dict(state)
        for expected, batch in zip(whole[stop:], second, strict=True):
            assert all(np.array_equal(batch[key], expected[key]) for key in expected)
    with pytest.raises(DataError, match="size: 64 → 32"):
        stream(tokenizer, 32).load_state_dict(state)
    assert not hasattr(first, "batch_at")  # trainers use this method to detect an indexed order


LOOPS = (
    *("rows/documents", "rows/splits", "tokens/encoder", "tokens/audio", "tokens/media"),
    *("batches/arrays", "checks", "build", "report", "save"),
)


@pytest.mark.parametrize("module", LOOPS)
def test_loops_over_rows_compare_nothing_with_a_kind(module):
    source = (Path(ed_data.__file__).parent / f"{module}.py").read_text()
    tasks = {schema.task for schema in ROW_KINDS.values()}
    names = {name.upper() for name in ROW_KINDS}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.Match):
            compared = ast.unparse(node)
            assert ".task" not in compared, compared
            assert not names & {*re.findall(r"\w+", compared)}, compared
        assert not (isinstance(node, ast.Constant) and node.value in tasks), node.value


@pytest.mark.parametrize("name", ROW_KINDS)
def test_example_of_a_kind_has_the_fields_of_its_schema(name, tmp_path, monkeypatch):
    schema, row = ROW_KINDS[name], dict(ROW_KINDS[name].kind.example)
    monkeypatch.chdir(tmp_path)
    for file in (row[key] for key in ("image", "audio") if key in row):
        Path(file).write_bytes(b"unread")
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    (document,) = documents(Inform(data_files="rows.jsonl"), schema=schema)
    assert [*document.fields] == [*schema.fields]
    assert len(document.values) == len(schema.values)
    assert len(document.media) == schema.kind.has_image + schema.kind.has_audio


def test_kind_of_a_schema_follows_from_its_fields_and_its_task():
    for schema in ROW_KINDS.values():
        again = Schema(
            schema.columns, schema.content, schema.values, schema.task, schema.other_content
        )
        assert again == schema
        assert again.kind is schema.kind
        assert pickle.loads(pickle.dumps(schema)).kind == schema.kind
    labels = CLASSIFICATION.with_classes(("bad", "good"))
    assert labels.kind is CLASSIFICATION.kind
    assert not Schema((Column("", "content"),)).kind.is_text
