"""Preference rows in the layouts of public data: whole chats, and pairs without a prompt."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ed_data import (
    DataError,
    Inform,
    Tokenization,
    build_loader,
    build_prompts,
    check_names,
    documents,
)
from ed_data.rows.contents import separate_prompt
from ed_data.schema import (
    COMPLETION,
    LABELLED,
    PREFERENCE,
    PROMPT,
    REWARD,
    SEQ2SEQ_PREFERENCE,
)
from ed_data.tokens.encoder import Encoder


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
GOOD, BAD = answer("hello"), answer("go away")
PLAIN = {"prompt": [user("hi")], "chosen": [GOOD], "rejected": [BAD]}


def only(jsonl, row, schema=PREFERENCE, **options):
    (found,) = documents(Inform(data_files=jsonl([row]), **options), schema=schema)
    return found


@pytest.mark.parametrize("schema", [PREFERENCE, REWARD])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": [user("hi"), GOOD], "rejected": [user("hi"), BAD]},
        {"prompt": " hi\n", "chosen": [user("hi"), GOOD], "rejected": [user("hi"), BAD]},
        {"prompt": [user("hi")], "chosen": [user("hi"), GOOD], "rejected": [user("hi"), BAD]},
        {"chosen": [user("hi"), GOOD], "rejected": [user("hi"), BAD]},
        {"prompt": None, "chosen": [user("hi"), GOOD], "rejected": [user("hi"), BAD]},
        {"prompt": [user("hi")], "chosen": [user("hi"), GOOD], "rejected": [BAD]},
        {"prompt": "hi", "chosen": [user("hi"), GOOD], "rejected": "go away"},
        # A table adds null for the keys of other messages.
        {
            "prompt": [{**user("hi"), "tool_calls": None}],
            "chosen": [user("hi"), GOOD],
            "rejected": [user("hi"), BAD],
        },
    ],
)
def test_prompt_has_no_loss_in_any_layout(tokenizer, jsonl, row, schema):
    """Each layout produces the tokens of prompt and answers, with the prompt once."""
    encoder = Encoder.create(tokenizer, Tokenization(), None, schema)
    wanted, found = (encoder.encode([only(jsonl, each, schema)], "x") for each in (PLAIN, row))
    for own, other in zip(found.tokens, wanted.tokens, strict=True):
        assert own.tolist() == other.tolist()
        assert tokenizer.decode(own).count("hi") == 1
    for own, other in zip(found.masks, wanted.masks, strict=True):
        assert own.tolist() == other.tolist()


def test_common_turns_of_two_chats_are_the_prompt(jsonl):
    turns = [user("hi"), answer("yes?"), user("more")]
    whole = {"chosen": [*turns, GOOD], "rejected": [*turns, BAD]}
    for row in (whole, {**whole, "prompt": "hi"}, {**whole, "prompt": "more"}):
        found = only(jsonl, row)
        assert found.fields == {"prompt": turns, "chosen": [GOOD], "rejected": [BAD]}
    early = {"chosen": [user("hi"), GOOD, user("so?"), GOOD], "rejected": [user("hi"), BAD]}
    found = only(jsonl, {**early, "prompt": "hi"})
    assert found.fields["prompt"] == [user("hi")]
    assert found.fields["chosen"] == early["chosen"][1:]
    same = only(jsonl, {"chosen": [user("hi"), GOOD], "rejected": [user("hi"), GOOD]})
    assert same.fields == {"prompt": [user("hi")], "chosen": [GOOD], "rejected": [GOOD]}


def test_system_message_may_occur_only_in_prompt_or_chats(jsonl):
    system = [SYSTEM, user("hi")]
    whole = {"chosen": [user("hi"), GOOD], "rejected": [user("hi"), BAD]}
    with_system = {name: [SYSTEM, *chat] for name, chat in whole.items()}
    for row in (
        {**whole, "prompt": system},
        {**with_system, "prompt": [user("hi")]},
        {**with_system, "prompt": "hi"},
        with_system,
    ):
        found = only(jsonl, row)
        assert found.fields == {"prompt": system, "chosen": [GOOD], "rejected": [BAD]}


def test_prompt_of_text_pair_is_the_common_prefix(jsonl):
    found = only(jsonl, {"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert found.fields == {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    found = only(jsonl, {"chosen": "Yes.", "rejected": "No."})
    assert found.fields == {"prompt": "", "chosen": "Yes.", "rejected": "No."}
    given = {"prompt": "", "chosen": "So it is.", "rejected": "So what."}
    assert only(jsonl, given).fields == given


def test_chat_may_continue_after_an_answer(jsonl):
    row = {
        "prompt": [user("hi"), GOOD],
        "chosen": [user("hi"), answer("again")],
        "rejected": [user("bye"), answer("so long")],
    }
    assert only(jsonl, row).fields == row


@pytest.mark.parametrize("schema", [COMPLETION, LABELLED])
@pytest.mark.parametrize("prompt", ["hi", [user("hi")]])
def test_completion_may_be_a_whole_chat(jsonl, schema, prompt):
    row = {"prompt": prompt, "completion": [user("hi"), GOOD], "label": True}
    assert only(jsonl, row, schema).fields == {"prompt": [user("hi")], "completion": [GOOD]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "bye", "chosen": [user("hi"), GOOD], "rejected": [user("hi"), BAD]},
            "'chosen': .* contradicts .* no user message of the chat is the prompt",
        ),
        (
            {"prompt": [user("bye")], "chosen": [user("hi"), GOOD], "rejected": [BAD]},
            "'chosen': .* its first messages differ from the prompt",
        ),
        (
            {"prompt": [user("hi")], "chosen": [GOOD], "rejected": [SYSTEM, user("no"), BAD]},
            "'rejected': .* its first messages differ from the prompt",
        ),
        (
            {
                "prompt": [user("hi")],
                "chosen": [SYSTEM, user("hi"), GOOD],
                "rejected": [user("hi"), BAD],
            },
            "'chosen' and 'rejected' are whole chats that begin with different prompts",
        ),
        (
            {
                "prompt": "hi",
                "chosen": [SYSTEM, user("hi"), GOOD],
                "rejected": [user("hi"), BAD],
            },
            "the chats differ before the message that is the prompt",
        ),
        (
            {"chosen": [user("hi"), GOOD], "rejected": [user("bye"), BAD]},
            "'chosen' and 'rejected' begin with different messages; add the field 'prompt'",
        ),
        (
            {"chosen": [user("hi"), GOOD], "rejected": "go away"},
            "the row has no prompt, and 'chosen' is chat and 'rejected' is text",
        ),
    ],
)
def test_contradicting_parts_raise_error_with_location(mixture, row, says):
    ((path, message),) = check_names(mixture([row]), PREFERENCE)
    assert path[:2] == ("informs", 0)
    with pytest.raises(DataError, match=rf"data\.jsonl:1.*{says}"):
        raise DataError(message)


def test_named_prompt_field_must_exist(mixture, jsonl):
    informs = [{"data_files": jsonl([{"chosen": "a b", "rejected": "a c"}])}]
    assert check_names(mixture(informs=informs), PREFERENCE) == []
    informs[0]["content_field"] = "prompt"
    ((path, message),) = check_names(mixture(informs=informs), PREFERENCE)
    assert path == ("informs", 0, "content_field") and "no field 'prompt'" in message


def test_named_content_field_is_used_in_rows_with_other_fields(mixture, jsonl, tokenizer):
    """A preference dataset with `messages` can be used for supervised training."""
    row = {**PLAIN, "messages": [user("hi"), GOOD]}
    informs = [{"data_files": jsonl([row]), "content_field": "messages"}]
    made = mixture(informs=informs)
    assert check_names(made) == []
    batch = build_loader(made, tokenizer).batch_at(0)
    assert "hello" in tokenizer.decode(batch["input_ids"][0])
    ((_, message),) = check_names(mixture([{**row, "content": "text"}]))
    assert "preference pair" in message and "only its 'content' would be trained on" in message


# --- pairs without a prompt, read by methods for prompts and for single answers ---

TURNS = [SYSTEM, user("hi"), answer("yes?"), user("more")]
#: (chosen, rejected, prompt, good, bad)
LAYOUTS = [
    ([user("hi"), GOOD], [user("hi"), BAD], [user("hi")], [GOOD], [BAD]),
    ([*TURNS, GOOD], [*TURNS, BAD], TURNS, [GOOD], [BAD]),
    ([*TURNS, GOOD, user("so?"), GOOD], [*TURNS, BAD], TURNS, [GOOD, user("so?"), GOOD], [BAD]),
    ([user("hi"), GOOD], [user("hi"), GOOD], [user("hi")], [GOOD], [GOOD]),
    ("The sky is blue.", "The sky is green.", "The sky is", " blue.", " green."),
    ("ab", "ab", "a", "b", "b"),
    ([4, 5, 6], [4, 5, 7, 8], [4, 5], [6], [7, 8]),
]


@pytest.mark.parametrize(("chosen", "rejected", "prompt", "good", "bad"), LAYOUTS)
def test_pair_without_prompt_is_a_row_of_each_kind(jsonl, chosen, rejected, prompt, good, bad):
    row = {"chosen": chosen, "rejected": rejected, "label": "of the source"}
    sides = {"prompt": prompt, "chosen": good, "rejected": bad}
    for schema in (PREFERENCE, REWARD, SEQ2SEQ_PREFERENCE):
        assert only(jsonl, row, schema).fields == sides
    asked = only(jsonl, row, PROMPT, additional_fields=["chosen"])
    assert (asked.fields, asked.extra) == ({"prompt": prompt}, {"chosen": good})
    unpaired = list(documents(Inform(data_files=jsonl([row])), schema=LABELLED))
    assert [document.fields for document in unpaired] == [
        {"prompt": prompt, "completion": good},
        {"prompt": prompt, "completion": bad},
    ]
    assert [document.values for document in unpaired] == [(1.0,), (0.0,)]


@pytest.mark.parametrize("prompt", ["more", TURNS, TURNS[1:]])
def test_pair_with_its_prompt_is_unpaired_like_the_pair_without(jsonl, prompt):
    pair = {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]}
    rows = jsonl([pair, {**pair, "question": prompt}])
    first, second = (
        [document.fields for document in documents(inform, schema=LABELLED)][-2:]
        for inform in (
            Inform(data_files=rows, num_rows=1),
            Inform(data_files=jsonl([{**pair, "question": prompt}]), content_field="question"),
        )
    )
    assert first == second
    # A method for prompts reads the prompt as it is.
    assert only(jsonl, {**pair, "prompt": prompt}, PROMPT).fields == {"prompt": prompt}


def test_pair_without_common_beginning_is_an_error_of_methods_for_prompts(mixture, jsonl):
    rows = [{"chosen": "Yes.", "rejected": "Yes!"}, {"chosen": "Yes.", "rejected": "No."}]
    inform = Inform(data_files=jsonl(rows))
    for schema in (PROMPT, SEQ2SEQ_PREFERENCE):
        with pytest.raises(DataError, match=r"jsonl:2: the row has no 'prompt', .* no common beg"):
            list(documents(inform, schema=schema))
        skipping = inform.replace(on_error="skip")
        assert [d.fields["prompt"] for d in documents(skipping, schema=schema)] == ["Yes"]
    unpaired = documents(inform, schema=LABELLED)
    assert [d.fields["prompt"] for d in unpaired] == ["Yes", "Yes", "", ""]
    assert check_names(mixture(rows), LABELLED) == []
    ((path, message),) = check_names(mixture(rows[1:]), PROMPT)
    assert path[:2] == ("informs", 0) and "add the field 'prompt'" in message


MIXED = [
    {"prompt": "1?", "completion": " one", "label": False, "chosen": None, "rejected": None},
    {"prompt": None, "completion": None, "label": None, "chosen": "2? yes", "rejected": "2? no"},
    {"prompt": "3?", "completion": None, "label": None, "chosen": " three", "rejected": " free"},
]


@pytest.mark.parametrize("kind", ["json", "parquet", "csv"])
def test_rows_of_several_kinds_may_share_a_file(tmp_path, jsonl, kind):
    import pyarrow as pa
    from pyarrow import csv, parquet

    path = str(tmp_path / f"rows.{kind}")
    if kind == "json":
        # Lines have only the fields of their kind.
        path = jsonl([{n: v for n, v in row.items() if v is not None} for row in MIXED])
    else:
        write = parquet.write_table if kind == "parquet" else csv.write_csv
        write(pa.Table.from_pylist(MIXED), path)
    inform = Inform(data_files=path, type=kind)
    answers = [(*d.fields.values(), *d.values) for d in documents(inform, schema=LABELLED)]
    expected = [("1?", " one", 0.0), ("2?", " yes", 1.0), ("2?", " no", 0.0)]
    assert answers == [*expected, ("3?", " three", 1.0), ("3?", " free", 0.0)]
    prompts = [d.fields["prompt"] for d in documents(inform, schema=PROMPT)]
    assert prompts == ["1?", "2?", "3?"]
    assert len(list(documents(inform.replace(num_rows=2), schema=LABELLED))) == 3
    paired = inform.replace(num_rows=None, on_error="skip")
    assert [d.fields["prompt"] for d in documents(paired, schema=PREFERENCE)] == ["2?", "3?"]


def test_unpaired_answers_are_equal_from_cache_files_and_stream(mixture, jsonl, tokenizer):
    rows = [{"chosen": f"{i}? yes", "rejected": f"{i}? no {i}"} for i in range(24)]
    rows[4] = {"prompt": "4?", "completion": " yes", "label": True}
    informs = [{"data_files": jsonl(rows)}]

    def build(**options):
        made = mixture(informs=informs, pack_tokens=False, pack_seq_length=None, **options)
        return build_loader(made, tokenizer, batch_size=1, seq_length=32, schema=LABELLED)

    stored, lazy = build(), build(pack_on_the_fly=True)
    assert stored.steps_per_epoch == 47
    for step in (0, 5, 31, 46, 47):
        for name, array in stored.batch_at(step).items():
            np.testing.assert_array_equal(array, lazy.batch_at(step)[name])

    def texts(loader, count):
        batches = list(itertools.islice(loader, count))
        return [(tokenizer.decode(b["input_ids"][0]), float(b["label"].max())) for b in batches]

    every = texts(build(streaming=True), 47)
    assert sorted(every) == sorted(
        (
            tokenizer.decode(stored.batch_at(i)["input_ids"][0]),
            float(stored.batch_at(i)["label"].max()),
        )
        for i in range(47)
    )


def test_stream_continues_between_the_two_answers_of_a_pair(jsonl):
    from ed_data.order.reading import Passes
    from ed_data.rows.documents import Documents

    rows = [{"chosen": f"{i}? yes", "rejected": f"{i}? no"} for i in range(3)]
    inform = Inform(data_files=jsonl(rows), num_rows=2)

    def build():
        return Passes(Documents(inform, schema=LABELLED), lambda example: True, None)

    passes = build()
    fields = [example.fields for example in iter(passes.next, None)]
    assert [f["completion"] for f in fields] == [" yes", " no", " yes", " no"]
    for count in range(5):
        first = build()
        for _ in range(count):
            first.next()
        again = build()
        again.load_state_dict(first.state_dict())
        assert [example.fields for example in iter(again.next, None)] == fields[count:]


def test_prompts_of_pairs_have_tools_and_the_start_of_an_answer(mixture, jsonl, tokenizer):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD], "tools": tools}
    whole = {"prompt": TURNS, "tools": tools}
    pairs, prompts = (
        build_prompts(mixture(informs=[{"data_files": jsonl([each], name)}]), tokenizer).batch_at(0)
        for each, name in ((row, "pair.jsonl"), (whole, "prompt.jsonl"))
    )
    assert pairs.prompts == prompts.prompts == [TURNS]
    assert pairs.input_ids == prompts.input_ids
    assert pairs.with_answers(0, [[GOOD]]) == prompts.with_answers(0, [[GOOD]])


@pytest.mark.nightly
def test_common_beginning_equals_that_of_trl():
    extract_prompt = pytest.importorskip("trl").extract_prompt
    words = ["".join(w) for n in range(1, 6) for w in itertools.product("a b", repeat=n)]
    chats = [[user(t) for t in w] for n in range(2, 4) for w in itertools.product("ab", repeat=n)]
    pairs = itertools.chain(itertools.product(words, words), itertools.product(chats, chats))
    for chosen, rejected in pairs:
        if chosen[0] != rejected[0]:
            continue  # TRL removes a space at the end of `chosen` here, which is not the prompt
        prompt, answers = separate_prompt(None, {"chosen": chosen, "rejected": rejected}, "row")
        extracted = extract_prompt({"chosen": chosen, "rejected": rejected})
        assert {"prompt": prompt, **answers} == extracted, (chosen, rejected)
