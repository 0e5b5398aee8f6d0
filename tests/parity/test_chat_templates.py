"""Tokens and masks of chats equal those of transformers and TRL, for public template families."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ed_data import DataError, Inform, Mixture, Tokenization, build_loader, build_prompts, documents
from ed_data.schema import COMPLETION, LABELLED, PREFERENCE, REWARD, TEXT, Schema
from ed_data.tokens.chats import end_of_answer
from ed_data.tokens.encoder import Encoder

from tests.parity.chat_families import (
    AGAIN,
    ANSWER,
    CALL,
    FAMILIES,
    RESULT,
    SIX,
    SYSTEM,
    THOUGHT,
    TOOL,
    USER,
    Family,
)

WRONG = {"role": "assistant", "content": "Five, I think."}
CASES = [(family, name) for family in FAMILIES.values() for name in family.rows()]


def case_id(value: Any) -> str:
    return value.name if isinstance(value, Family) else str(value)


@pytest.fixture
def encoded(tmp_path):
    """Encode rows as a run does: read from a file, as documents of a schema."""

    def encode(tokenizer, rows, schema: Schema = TEXT, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        content = {"content_field": "messages"} if schema == TEXT else {}
        found = list(documents(Inform(data_files=path, **content), schema=schema))
        encoder = Encoder.create(tokenizer, Tokenization(**options), None, schema)
        result = encoder.encode(found, "rows")
        masks = result.masks or [np.ones(len(ids), int) for ids in result.tokens]
        return [
            (ids.tolist(), mask.tolist()) for ids, mask in zip(result.tokens, masks, strict=True)
        ]

    return encode


def rendered(tokenizer, row, **options) -> dict[str, Any]:
    """Return the tokens of transformers."""
    kwargs = row.get("chat_template_kwargs", {})
    return tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), return_dict=True, **kwargs, **options
    )


# --- chats ---


@pytest.mark.parametrize(("family", "name"), CASES, ids=case_id)
def test_chats_have_the_tokens_of_transformers(encoded, family, name):
    """An answer that the template does not end is followed by one end-of-text token."""
    tokenizer, row = family.tokenizer(), family.rows()[name]
    expected = rendered(tokenizer, row)["input_ids"]
    ((ids, mask),) = encoded(tokenizer, [row])
    without_end = not family.has_end and row["messages"][-1]["role"] == "assistant"
    assert ids == [*expected, *([tokenizer.eos_token_id] if without_end else [])]
    assert all(mask)


MARKED = [family for family in FAMILIES.values() if family.reference]


def marked(family: Family) -> Any:
    """Return the tokenizer with TRL's template, which marks the answers."""
    folder = Path(pytest.importorskip("trl.chat_template_utils").__file__).parent
    tokenizer = family.tokenizer()
    template = folder / "chat_templates" / f"{family.reference}.jinja"
    tokenizer.chat_template = template.read_text("utf-8")
    return tokenizer


@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f in MARKED for n in f.rows() if n != "thinking"], ids=case_id
)
def test_marked_answers_have_the_mask_of_transformers(encoded, family, name):
    """TRL's templates mark the answers, as SFT with `assistant_only_loss` uses them."""
    tokenizer, row = marked(family), family.rows()[name]
    expected = rendered(tokenizer, row, return_assistant_tokens_mask=True)
    ((ids, mask),) = encoded(tokenizer, [row], assistant_only_loss=True)
    assert ids == expected["input_ids"]
    assert mask == expected["assistant_masks"]


@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f in MARKED for n in f.rows()], ids=case_id
)
def test_unmarked_answers_are_detected(encoded, family, name):
    """The tokens equal TRL's marks, except white space and the header of an answer."""
    row = family.rows()[name]
    expected = rendered(marked(family), row, return_assistant_tokens_mask=True)
    tokenizer = family.tokenizer()
    ((ids, mask),) = encoded(tokenizer, [row], assistant_only_loss=True)
    assert ids == expected["input_ids"]
    header = set(tokenizer(family.marked_header, add_special_tokens=False)["input_ids"])
    differing = {
        token
        for token, own, other in zip(ids, mask, expected["assistant_masks"], strict=True)
        if own != other
    }
    assert all(token in header or not tokenizer.decode([token]).strip() for token in differing)


def trl_template(name: str) -> str:
    folder = Path(pytest.importorskip("trl.chat_template_utils").__file__).parent
    return (folder / "chat_templates" / f"{name}.jinja").read_text("utf-8")


_GEMMA4 = Family(
    "gemma3",
    "<eos>",
    (
        *("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
        *("<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>", "<|tool>"),
        "<tool|>",
    ),
    "<bos>",
)
_V3 = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>"),
    *("<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"),
)
_CALL = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "call00001"}]}
_RESULT = {**RESULT, "tool_call_id": "call00001"}
_TEXT_CALL = {
    **_CALL,
    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}],
}
_GLM_CALL = (
    "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>"
)
_GLM_ANSWER = "\n<think></think>\nTwo plus two is four."
_V3_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 2, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
)
_V3_ANSWER = "Two plus two is four.<｜end▁of▁sentence｜>"
_GEMMA4_CALL = "<|tool_call>call:add{a:2,b:2}<tool_call|><|tool_response>"
_TURNS, _TOOLED = [USER, ANSWER, AGAIN, SIX], [USER, _CALL, _RESULT, ANSWER]
#: Template of TRL, messages, and the text that the model writes.
LEARNED = [
    ("glm4moe", _TURNS, [_GLM_ANSWER, "<|user|>\n<think></think>\nSix.<|endoftext|>"]),
    ("glm4moe", _TOOLED, [_GLM_CALL, _GLM_ANSWER, "<|endoftext|>"]),
    ("glm4moe_training", _TURNS, [_GLM_ANSWER, "<|user|>\n<think></think>\nSix.<|user|>"]),
    ("glm4moe_training", _TOOLED, [_GLM_CALL, _GLM_ANSWER, "<|user|>"]),
    ("deepseekv3", _TOOLED, [_V3_CALL, _V3_ANSWER]),
    ("deepseekv3", [USER, _TEXT_CALL, _RESULT, ANSWER], [_V3_CALL, _V3_ANSWER]),
    ("deepseekv3", [*_TOOLED, AGAIN, SIX], [_V3_CALL, _V3_ANSWER, "Six.<｜end▁of▁sentence｜>"]),
    (
        "deepseekv3_training",
        _TOOLED,
        ["<｜Assistant｜>", _V3_CALL, "<｜tool▁outputs▁end｜>", _V3_ANSWER],
    ),
    ("gemma4", _TURNS, ["Two plus two is four.<turn|>", "Six.<turn|>"]),
    *(
        (name, _TOOLED, [_GEMMA4_CALL, "Two plus two is four.<turn|>"])
        for name in ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")
    ),
]


@pytest.mark.parametrize(("name", "messages", "texts"), LEARNED)
def test_answers_are_learned_with_their_end_and_without_tool_responses(
    encoded, name, messages, texts
):
    """The end of a turn of GLM-4 is the header of the next one, as TRL's template marks it."""
    family = FAMILIES.get(name.removesuffix("_training"), _GEMMA4)
    if name.startswith("deepseekv3"):
        family = replace(family, plain=(*family.plain, *_V3))
    tokenizer = family.tokenizer()
    tokenizer.chat_template = trl_template(name)
    row: dict[str, Any] = {"messages": messages}
    if name.startswith(("glm", "gemma")) and _CALL in messages:
        row["tools"] = [TOOL]
    ((ids, mask),) = encoded(tokenizer, [row], assistant_only_loss=True)
    learned = tokenizer.decode([t for t, flag in zip(ids, mask, strict=True) if flag])
    assert learned == "".join(texts)


THINKING = [USER, THOUGHT, AGAIN, {**SIX, "reasoning_content": "Three and three."}]


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("qwen3", "It is four.<|im_end|><think>\nThree and three.\n</think>\n\nSix.<|im_end|>"),
        ("deepseek_r1_distill", "It is four.<｜end▁of▁sentence｜>Six.<｜end▁of▁sentence｜>"),
    ],
)
def test_answers_are_detected_if_template_drops_earlier_thoughts(encoded, name, answers):
    tokenizer, row = FAMILIES[name].tokenizer(), {"messages": THINKING}
    ((ids, mask),) = encoded(tokenizer, [row], assistant_only_loss=True)
    assert ids == rendered(tokenizer, row)["input_ids"]
    assert tokenizer.decode([t for t, flag in zip(ids, mask, strict=True) if flag]) == answers


@pytest.mark.parametrize("name", ["glm4moe", "gptoss"])
def test_answers_rewritten_by_template_require_marks(encoded, name):
    tokenizer, row = FAMILIES[name].tokenizer(), {"messages": THINKING}
    with pytest.raises(DataError, match=r"message 1 differently.*\{% generation %\}"):
        encoded(tokenizer, [row], assistant_only_loss=True)
    assert (
        encoded(tokenizer, [row])[0][0][: -1 if name == "glm4moe" else None]
        == (rendered(tokenizer, row)["input_ids"])
    )


@pytest.mark.parametrize("family", FAMILIES.values(), ids=case_id)
def test_end_of_answer_always_has_loss(encoded, family):
    """The last token other than white space ends the answer and has a loss."""
    tokenizer = family.tokenizer()
    for row in family.rows().values():
        if row["messages"][-1]["role"] != "assistant":
            continue
        ((ids, mask),) = encoded(tokenizer, [row], assistant_only_loss=True)
        last = max(i for i, t in enumerate(ids) if tokenizer.decode([t]).strip())
        assert ids[last] in tokenizer.all_special_ids
        assert mask[last] == 1
        first = mask.index(1)
        assert mask[first : last + 1] == [1] * (last + 1 - first) or len(row["messages"]) > 2


@pytest.mark.parametrize("family", FAMILIES.values(), ids=case_id)
def test_end_token_of_answers_is_detected(family):
    tokenizer = family.tokenizer()
    end = end_of_answer(tokenizer)
    assert tokenizer.convert_ids_to_tokens(end) == (family.end or family.eos)


# --- prompts and answers, as TRL prepares them ---


def prepared(trainer: str, tokenizer, rows, **options) -> list[dict[str, Any]]:
    """Return the rows that a trainer of TRL prepares, without a model."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    kind, config = getattr(trl, f"{trainer}Trainer"), getattr(trl, f"{trainer}Config")
    trainer_itself = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=None,
        completion_only_loss="completion" in rows[0],
        _is_vision_dataset=False,
        _is_vlm=False,
        calculate_KL=False,
    )
    more = (False, None) if trainer == "SFT" else ()
    arguments = config(output_dir="unused", bf16=False, use_cpu=True, report_to=[], **options)
    dataset = datasets.Dataset.from_list(rows)
    made = kind._prepare_dataset(trainer_itself, dataset, tokenizer, arguments, *more, "train")
    return list(made)


TOOLED = {"tools": json.dumps([TOOL])}
PAIRS: dict[str, dict[str, Any]] = {
    "one turn": {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
    "several turns": {"prompt": [USER, ANSWER, AGAIN], "chosen": [SIX], "rejected": [WRONG]},
    "system": {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [WRONG]},
    "tools": {"prompt": [USER, CALL, RESULT], "chosen": [ANSWER], "rejected": [WRONG], **TOOLED},
    "thinking": {"prompt": [USER], "chosen": [THOUGHT], "rejected": [WRONG]},
    "thinking off": {
        "prompt": [USER],
        "chosen": [ANSWER],
        "rejected": [WRONG],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "without prompt": {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
}
PAIR_CASES = [
    (family, name)
    for family in FAMILIES.values()
    for name in PAIRS
    if name in (*family.rows(), "without prompt")
]


def with_end(family: Family, tokenizer, ids: list[int]) -> list[int]:
    """TRL adds no end to an answer if the template has none."""
    return ids if family.has_end else [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize(("family", "name"), PAIR_CASES, ids=case_id)
@pytest.mark.daily("chatml-*", "qwen3-*", "gptoss-*")
def test_preference_pairs_match_trl(encoded, family, name):
    tokenizer, row = family.tokenizer(), PAIRS[name]
    (theirs,) = prepared("DPO", tokenizer, [row])
    chosen, rejected = encoded(tokenizer, [row], PREFERENCE)
    for (ids, mask), side in ((chosen, "chosen_ids"), (rejected, "rejected_ids")):
        answer = with_end(family, tokenizer, theirs[side])
        assert ids == theirs["prompt_ids"] + answer
        assert mask == [0] * len(theirs["prompt_ids"]) + [1] * len(answer)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=case_id)
def test_scored_answers_match_trl(encoded, family):
    tokenizer, row = family.tokenizer(), PAIRS["one turn"]
    (theirs,) = prepared("Reward", tokenizer, [row])
    (chosen, _), (rejected, _) = encoded(tokenizer, [row], REWARD)
    assert chosen == with_end(family, tokenizer, theirs["chosen_ids"])
    assert rejected == with_end(family, tokenizer, theirs["rejected_ids"])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=case_id)
@pytest.mark.daily("chatml", "gptoss", "llama3_1")
def test_completions_match_trl(encoded, family):
    tokenizer = family.tokenizer()
    row = {"prompt": [USER, ANSWER, AGAIN], "completion": [SIX]}
    (theirs,) = prepared("SFT", tokenizer, [row])
    ((ids, mask),) = encoded(tokenizer, [row], COMPLETION)
    assert ids == with_end(family, tokenizer, theirs["input_ids"])
    labels = [t if flag else -100 for t, flag in zip(ids, mask, strict=True)]
    assert labels == with_end(family, tokenizer, theirs["labels"])
    (theirs,) = prepared("KTO", tokenizer, [{**row, "label": True}], loss_type="apo_zero_unpaired")
    ((ids, mask),) = encoded(tokenizer, [{**row, "label": True}], LABELLED)
    answer = with_end(family, tokenizer, theirs["completion_ids"])
    assert (ids, mask) == (
        [*theirs["prompt_ids"], *answer],
        [0] * len(theirs["prompt_ids"]) + [1] * len(answer),
    )


TEXTS = [
    {"prompt": "What is two plus two? ", "chosen": "Two plus two", "rejected": "Five"},
    {"prompt": "user\n", "chosen": "\nassistant", "rejected": " assistant"},
    {"chosen": "What is two? Two.", "rejected": "What is two? Tulips."},
    {"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
]


@pytest.mark.parametrize("row", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_text_pairs_match_trl(encoded, name, row):
    tokenizer = FAMILIES[name].tokenizer()
    (theirs,) = prepared("DPO", tokenizer, [row])
    sides = encoded(tokenizer, [row], PREFERENCE)
    for (ids, mask), side in zip(sides, ("chosen_ids", "rejected_ids"), strict=True):
        assert ids == theirs["prompt_ids"] + theirs[side]
        assert mask == [0] * len(theirs["prompt_ids"]) + [1] * len(theirs[side])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=case_id)
def test_reward_scoring_uses_same_tokens_as_training(encoded, tmp_path, family):
    """Compare training pairs with a prompt and a sampled answer for scoring."""
    tokenizer = family.tokenizer()
    for name in ("one turn", "several turns", "tools"):
        if name not in family.rows():
            continue
        row = PAIRS[name]
        (chosen, _), (rejected, _) = encoded(tokenizer, [row], REWARD)
        mixture = Mixture(informs=[Inform(data_files=tmp_path / "rows.jsonl")])
        batch = build_prompts(mixture, tokenizer).batch_at(0)
        answers = [[{**row[side][0]}] for side in ("chosen", "rejected")]
        assert batch.with_answers(0, answers) == [chosen, rejected]


# --- truncation ---


def test_long_pairs_are_truncated_as_in_trl(tmp_path):
    """Both sides of a pair keep their start."""
    collators = pytest.importorskip("trl.trainer.dpo_trainer")
    tokenizer, row = FAMILIES["chatml"].tokenizer(), PAIRS["several turns"]
    theirs = prepared("DPO", tokenizer, [row])
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    whole = len(theirs[0]["prompt_ids"] + theirs[0]["rejected_ids"])
    for length in (whole + 1, whole - 1, whole - 4):
        collator = collators.DataCollatorForPreference(tokenizer.pad_token_id, length)
        expected = {name: array.numpy() for name, array in collator(theirs).items()}
        mixture = Mixture(informs=[Inform(data_files=path)], pack_on_the_fly=True)
        loader = build_loader(mixture, tokenizer, seq_length=length, schema=PREFERENCE)
        batch = loader.batch_at(0)
        for number, side in enumerate(("chosen", "rejected")):
            present = expected["attention_mask"][number] == 1
            ids = expected["input_ids"][number][present]
            labels = np.where(expected["completion_mask"][number][present] == 1, ids, -100)
            real = batch[f"{side}_segment_ids"][0] == 1
            assert batch[f"{side}_input_ids"][0][real].tolist() == ids.tolist()
            assert batch[f"{side}_labels"][0][real].tolist() == labels.tolist()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=case_id)
@pytest.mark.daily("chatml", "gptoss")
def test_long_chats_are_truncated_as_in_trl(tmp_path, family):
    """The start is kept, with the mask of the kept tokens."""
    tokenizer = family.tokenizer()
    row = {"prompt": [USER, ANSWER, AGAIN], "completion": [SIX]}
    length = len(rendered(tokenizer, {"messages": [USER, ANSWER, AGAIN, SIX]})["input_ids"]) - 1
    (theirs,) = prepared("SFT", tokenizer, [row], max_length=length)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    mixture = Mixture(informs=[Inform(data_files=path)], pack_on_the_fly=True)
    batch = build_loader(mixture, tokenizer, seq_length=length, schema=COMPLETION).batch_at(0)
    assert batch["input_ids"][0].tolist() == theirs["input_ids"]
    assert batch["labels"][0].tolist() == theirs["labels"]
