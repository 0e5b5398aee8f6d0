"""Preference rows in the layouts of public data: whole chats, and pairs without a prompt."""

from __future__ import annotations

import pytest
from ed_data import DataError, Inform, Tokenization, build_loader, check_names, documents
from ed_data.schema import COMPLETION, LABELLED, PREFERENCE, REWARD
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
