"""Encoding of chats: the end of a chat, tokens with loss, and arguments of the template."""

from __future__ import annotations

import copy
import json
import logging
import re

import pyarrow as pa
import pyarrow.parquet as pq
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
from ed_data.rows.example import Example
from ed_data.schema import PREFERENCE, TEXT
from ed_data.tokens.encoder import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
CHAT = [USER, ANSWER]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def with_template(tokenizer, template, special=()):
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def encoded(tokenizer, content, template=None, schema=TEXT, **options):
    encoder = Encoder.create(tokenizer, Tokenization(**options), None, schema)
    example = Example({"content": content}, template=template or {})
    result = encoder.encode([example], "x")
    mask = None if result.masks is None else result.masks[0].tolist()
    return result.tokens[0].tolist(), mask


LINES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED_LINES = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("template", [LINES, MARKED_LINES])
def test_eos_after_an_answer_always_has_loss(tokenizer, template):
    """The line end before EOS also has loss, because a model must generate it."""
    ids, mask = encoded(with_template(tokenizer, template), CHAT, assistant_only_loss=True)
    assert tokenizer.decode(ids) == "user: hi\nassistant: hello\n<|eos|>"
    learned = tokenizer.decode([t for t, flag in zip(ids, mask, strict=True) if flag])
    assert learned == "hello\n<|eos|>"


@pytest.mark.parametrize("template", [LINES, MARKED_LINES])
def test_question_at_the_end_of_a_chat_has_no_eos(tokenizer, template):
    ids, mask = encoded(with_template(tokenizer, template), [*CHAT, USER], assistant_only_loss=True)
    assert tokenizer.decode(ids) == "user: hi\nassistant: hello\nuser: hi\n"
    assert any(mask)


@pytest.mark.parametrize("end", ["<|im_end|>\n", "<|im_end|>", "<|im_end|> \n\n", "<|eos|>\n"])
def test_chat_has_exactly_one_end_token(tokenizer, end):
    template = LINES.replace("{{ m.content }}\n", "{{ m.content }}" + end)
    made = with_template(tokenizer, template, ["<|im_end|>"])
    for options in ({}, {"assistant_only_loss": True}):
        ids, _ = encoded(made, CHAT, **options)
        assert ids == made.apply_chat_template(CHAT)["input_ids"]


WHITE = st.text(" \n\t", max_size=3)
WORDS = st.text("ab .:é", min_size=1, max_size=6).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(
    bos=st.booleans(),
    header=st.sampled_from(["{{ m.role }}:", "<|im_start|>{{ m.role }}\n", "[{{ m.role }}]"]),
    end=st.sampled_from(["", "<|im_end|>", "<|eos|>", "\n### END"]),
    last=st.sampled_from(["", "<|eos|>"]),
    white=WHITE,
    words=st.lists(WORDS, min_size=2, max_size=5),
    assistant_only_loss=st.booleans(),
)
def test_chat_tokens_equal_those_of_transformers(
    tokenizer, bos, header, end, last, white, words, assistant_only_loss
):
    """An answer without an end token gets one EOS, and the end of an answer has loss."""
    template = (
        ("<|bos|>" if bos else "")
        + "{% for m in messages %}"
        + f"{header}{{{{ m.content }}}}{end}{white}"
        + "{% endfor %}{% if add_generation_prompt %}"
        + header.replace("{{ m.role }}", "assistant")
        + ("{% else %}" + last if last else "")
        + "{% endif %}"
    )
    made = with_template(tokenizer, template, ["<|im_start|>", "<|im_end|>"])
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(words)]
    expected = made.apply_chat_template(chat)["input_ids"]
    is_answer = len(words) % 2 == 0
    ids, mask = encoded(made, chat, assistant_only_loss=assistant_only_loss)
    ends = bool(last) or end in ("<|im_end|>", "<|eos|>")
    assert ids == [*expected, *([made.eos_token_id] if is_answer and not ends else [])]
    if assistant_only_loss and is_answer:
        ended = max(i for i, t in enumerate(ids) if made.decode([t]).strip())
        assert mask[ended] == 1 and mask[0] == 0


# --- tools and chat_template_kwargs ---

SHOWING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if mood is defined %}{{ mood }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ROW = {"messages": CHAT, "tools": [TOOL], "chat_template_kwargs": {"mood": "calm"}}


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {**ROW, "tools": json.dumps([TOOL])},
        {**ROW, "chat_template_kwargs": json.dumps({"mood": "calm"})},
        {"messages": CHAT, "tools": None, "chat_template_kwargs": {"mood": None}},
        {"messages": CHAT, "tools": []},
        {"messages": CHAT},
    ],
)
@pytest.mark.parametrize("assistant_only_loss", [False, True])
def test_tools_and_arguments_of_a_row_are_passed_to_the_template(
    tokenizer, jsonl, row, assistant_only_loss
):
    made = with_template(tokenizer, SHOWING)
    inform = Inform(data_files=jsonl([row]), content_field="messages")
    options = Tokenization(assistant_only_loss=assistant_only_loss)
    encoder = Encoder.create(made, options, None)
    (ids,) = encoder.encode(list(documents(inform)), "x").tokens
    tools = [TOOL] if row.get("tools") else None
    mood = {"mood": "calm"} if row.get("tools") else {}
    assert ids.tolist() == made.apply_chat_template(CHAT, tools=tools, **mood)["input_ids"]
    assert ("calm" in made.decode(ids)) == bool(mood)


@pytest.mark.parametrize("fields", [(), ("tools",), ("tools", "chat_template_kwargs")])
def test_tools_are_read_from_columns_of_a_table(tokenizer, tmp_path, fields):
    row = {name: ROW[name] for name in ("messages", *fields)} | {"other": 1}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    (found,) = documents(Inform(data_files=path, content_field="messages"))
    assert set(found.template) == {{"chat_template_kwargs": "mood"}.get(f, f) for f in fields}


def test_pairs_and_prompts_may_have_tools(tokenizer, mixture):
    made = with_template(tokenizer, SHOWING)
    row = {**ROW, "prompt": [USER], "chosen": [ANSWER], "rejected": "no"}
    loader = build_loader(mixture([row], pack_seq_length=256), made, schema=PREFERENCE)
    batch = loader.batch_at(0)
    for side in ("chosen", "rejected"):
        assert '"name": "add"' in made.decode(batch[f"{side}_input_ids"][0])
    prompts = build_prompts(mixture([row]), made).batch_at(0)
    assert (
        prompts.input_ids[0]
        == (
            made.apply_chat_template([USER], tools=[TOOL], mood="calm", add_generation_prompt=True)[
                "input_ids"
            ]
        )
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tools": "[{"}, "'tools' is a text, but not JSON"),
        ({"tools": {"name": "add"}}, "'tools' must be a list of JSON schemas"),
        ({"tools": ["add"]}, "'tools' must be a list of JSON schemas"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' must be a mapping"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs sets 'tokenize'"),
    ],
)
def test_invalid_tools_and_arguments_raise_error_before_a_run(mixture, jsonl, change, says):
    informs = [{"data_files": jsonl([{**ROW, **change}]), "content_field": "messages"}]
    ((path, message),) = check_names(mixture(informs=informs))
    assert path[:2] == ("informs", 0)
    assert says in message and "data.jsonl:1" in message


def test_text_rows_may_have_a_field_named_tools(mixture, jsonl):
    informs = [{"data_files": jsonl([{"content": "text", "tools": "hammer"}])}]
    assert check_names(mixture(informs=informs)) == []


def test_unused_template_arguments_are_logged(tokenizer, caplog):
    made = with_template(tokenizer, LINES)
    encoder = Encoder.create(made, Tokenization(), None)
    example = Example({"content": CHAT}, place="row 1", template={"style": "brief"})
    with caplog.at_level(logging.WARNING, "ed_data"):
        encoder.encode([example, example], "x")
        encoder.encode([example], "x")
    assert caplog.text.count("the chat template does not read 'style'") == 1


def test_rows_with_tools_use_the_tool_template(tokenizer, caplog):
    made = with_template(tokenizer, SHOWING)
    made.chat_template = {"default": MARKED_LINES, "tool_use": SHOWING}
    for arguments in ({}, {"tools": [TOOL]}):
        ids, mask = encoded(made, [*CHAT, USER], arguments, assistant_only_loss=True)
        assert ids == made.apply_chat_template([*CHAT, USER], **arguments)["input_ids"]
        learned = made.decode([t for t, flag in zip(ids, mask, strict=True) if flag])
        assert learned == ("hello<|eos|>" if arguments else "hello")
    assert "does not read" not in caplog.text


def test_changed_tools_change_the_fingerprint(tokenizer, mixture):
    made = with_template(tokenizer, SHOWING)

    def state(**changes):
        informs = [{"data_files": path, "content_field": "messages"}]
        rows = [{**ROW, **changes}]
        with open(path, "w") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
        return build_loader(mixture([], informs=informs, pack_seq_length=256), made)

    path = mixture().informs[0].files[0]
    with pytest.raises(DataError, match="sources"):
        state(tools=None).load_state_dict(state().state_dict())


@pytest.mark.parametrize("format", ["json", "parquet"])
def test_saved_chats_keep_their_tools(tokenizer, mixture, jsonl, tmp_path, format):
    """Saved documents can be read as rows with the same tokens."""
    made = with_template(tokenizer, SHOWING)
    informs = [{"data_files": jsonl([ROW]), "content_field": "messages"}]
    saving = {"path": tmp_path / "out", "format": format}
    options = mixture([], informs=informs, pack_tokens=False, save=saving)
    first = build_loader(options, made, seq_length=256).batch_at(0)
    (path,) = (tmp_path / "out").glob("train-*")
    again = mixture([], informs=[{"data_files": path, "content_field": "text"}])
    second = build_loader(again.replace(pack_tokens=False), made, seq_length=256).batch_at(0)
    assert first["input_ids"].tolist() == second["input_ids"].tolist()


def test_table_rejects_tools_missing_in_its_first_rows(tokenizer, mixture, jsonl, tmp_path):
    rows = [{"messages": CHAT}] * 1024 + [ROW]
    informs = [{"data_files": jsonl(rows), "content_field": "messages"}]
    saving = {"path": tmp_path / "out"}
    options = mixture([], informs=informs, pack_tokens=False, save=saving)
    with pytest.raises(DataError, match="a later row has the fields chat_template_kwargs, tools"):
        build_loader(options, with_template(tokenizer, SHOWING), seq_length=256)


def test_marked_answers_end_where_the_tokenizer_drops_white_space():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["first", "question", "an", "answer", "SECRET", "<end>", "<pad>"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words_only = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="<pad>"
    )
    words_only.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end>"
        "\n{% endgeneration %}{% else %}{{ m.content }} <end>\n{% endif %}{% endfor %}"
    )
    chat = [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "SECRET"},
        {"role": "assistant", "content": "answer"},
    ]
    ids, mask = encoded(words_only, chat, {}, assistant_only_loss=True)
    learned = words_only.decode([t for t, flag in zip(ids, mask, strict=True) if flag])
    assert learned.split() == ["an", "answer", "<end>", "answer", "<end>"]


MARKS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}BEFORE{{ m.content }}WITHIN{% endgeneration %}AFTER"
    "{% else %}OTHER{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("before", "within", "after", "other", "words"),
    [
        ("{% generation %}", "<|eos|>", "", "{{ m.content }}<|eos|>", ""),
        ("{% generation %}", "", "<|eos|>", "{{ m.content }}<|eos|>", r"end before '<\|eos\|>'"),
        (
            "{% generation %}",
            "<|eos|>",
            "",
            "{% generation %}{{ m.content }}<|eos|>{% endgeneration %}",
            "contain a message of the role user",
        ),
    ],
)
def test_marks_that_do_not_cover_the_answers_are_warned_of_once(
    tokenizer, caplog, before, within, after, other, words
):
    template = MARKS.replace("BEFORE", before).replace("WITHIN", within)
    template = template.replace("AFTER", after).replace("OTHER", other)
    chat = [
        {"role": "user", "content": "what is two plus two?"},
        {"role": "assistant", "content": "four"},
    ]
    with caplog.at_level("WARNING", logger="ed_data"):
        encoded(with_template(tokenizer, template), chat * 2, {}, assistant_only_loss=True)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(words)
    assert re.search(words, "".join(messages))
