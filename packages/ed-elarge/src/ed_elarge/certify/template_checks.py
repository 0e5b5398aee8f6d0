"""The chat template: its files, and the tokens of trainer, engine and transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ed_elarge.certify.chats import ANSWER, CONVERSATIONS, SHAPES, TOOLS, tool_conversation
from ed_elarge.certify.outcome import (
    Failed,
    ModelCheck,
    NotApplicable,
    Outcome,
    pass_check,
    require_claim,
)
from ed_elarge.certify.subject import CertifiedModel, read_json

#: Number of characters at which the end of a text is recognized as the beginning of an answer.
SHORTEST_HEADER = 12


def files_agree(subject: CertifiedModel) -> Outcome:
    folder, templates = subject.folder, {}
    if (folder / "chat_template.jinja").is_file():
        text = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        templates["chat_template.jinja"] = text
    for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
        if (folder / name).is_file():
            stored = read_json(folder / name).get("chat_template")
            if isinstance(stored, str):
                templates[name] = stored
    if not templates:
        raise NotApplicable("no file contains a chat template")
    summary = ", ".join(f"{name} {_digest(text)}" for name, text in templates.items())
    require_claim(len({*templates.values()}) == 1, f"the files have different templates: {summary}")
    return pass_check(summary)


def equals_base(subject: CertifiedModel) -> Outcome:
    template, base_template = _source(subject), _source(subject.base)
    require_claim(
        template == base_template,
        f"the template has SHA-256 {_digest(template)}, that of the base model "
        f"{_digest(base_template)}; they "
        f"differ from character {_differs(template, base_template)}",
    )
    return pass_check(f"SHA-256 {_digest(template)}")


def equal_tokens(subject: CertifiedModel) -> Outcome:
    """Compare the tokens of engine, trainer and transformers."""
    encodings, count = subject.encodings, 0
    for name, chat, options in encodings.cases():
        theirs = encodings.encode_with_transformers(
            chat[:-1], add_generation_prompt=True, **options
        )
        ours = encodings.encode_with_engine(chat[:-1], **options)
        _require_equal(ours, theirs, f"engine and transformers differ in {name!r}")
        conversation_tokens = encodings.encode_with_transformers(chat, **options)
        trained = encodings.encode_with_trainer(chat, **options)[0]
        _require_equal(
            trained[: len(conversation_tokens)],
            conversation_tokens,
            f"trainer and transformers differ in {name!r}",
        )
        count += 1
    return pass_check(f"{count} conversations have equal tokens")


def shapes_have_equal_tokens(subject: CertifiedModel) -> Outcome:
    """Compare the tokens of engine and trainer for conversations as clients write them."""
    encodings, count = subject.encodings, 0
    for name, chat in SHAPES.items():
        calls = any(message["role"] in ("tool", "function") for message in chat)
        options: dict[str, Any] = {"tools": TOOLS} if calls else {}
        try:
            prompt = encodings.encode_with_engine(chat, add_generation_prompt=False, **options)
        except Exception:  # templates may raise any exception
            continue
        trained = encodings.encode_with_trainer(chat, **options)[0]
        _require_equal(
            trained[: len(prompt)], prompt, f"trainer and engine differ in the shape {name!r}"
        )
        count += 1
    return pass_check(f"{count} of {len(SHAPES)} shapes of conversations have equal tokens")


def prompt_begins_training_text(subject: CertifiedModel) -> Outcome:
    encodings, count = subject.encodings, 0
    for name, chat, options in encodings.cases():
        prompt = encodings.encode_with_engine(chat[:-1], **options)
        trained = encodings.encode_with_trainer(chat, **options)[0]
        _require_equal(
            trained[: len(prompt)],
            prompt,
            f"the prompt of the engine is not the beginning of the trained text in {name!r}",
        )
        count += 1
    return pass_check(f"{count} prompts are beginnings of the trained texts")


def prompt_ends_before_answer(subject: CertifiedModel) -> Outcome:
    chat = CONVERSATIONS["one turn"]
    prompt = subject.encodings.text(chat[:-1], add_generation_prompt=True)
    if prompt != subject.encodings.text(chat[:-1]):
        return pass_check(f"the prompt ends with {prompt[-24:]!r}")
    conversation_text = subject.encodings.text(chat)
    between = (
        conversation_text.removeprefix(prompt).partition(ANSWER)[0]
        if conversation_text.startswith(prompt)
        else "?"
    )
    require_claim(
        not between.strip(),
        f"the template ignores add_generation_prompt, and writes {between!r} between a question "
        "and its answer: the model must generate this text",
    )
    tail = conversation_text.partition(ANSWER)[2]
    begin = prompt[-SHORTEST_HEADER:]
    require_claim(
        len(tail) < SHORTEST_HEADER or not tail.endswith(begin),
        f"the template adds the beginning of an answer, {begin!r}, to a complete conversation",
    )
    return pass_check("an answer follows the question without further text")


def turns_keep_tokens(subject: CertifiedModel) -> Outcome:
    chat = CONVERSATIONS["several turns"]
    first = subject.encodings.encode_with_transformers(chat[:2])
    second = subject.encodings.encode_with_transformers(chat[:3], add_generation_prompt=True)
    # A template may write an end token only after the last turn.
    shared = _differs(first, second)
    missing = subject.tokenizer.decode(first[shared:])
    require_claim(
        len(first) - shared <= 2,
        f"the tokens of the first turn change when a second turn follows, from token {shared} of "
        f"{len(first)}: {missing!r}",
    )
    return pass_check(f"{shared} of {len(first)} tokens of the first turn stay")


def messages_are_rendered(subject: CertifiedModel) -> Outcome:
    for name, chat, options in subject.encodings.cases():
        text = subject.tokenizer.decode(subject.encodings.encode_with_transformers(chat, **options))
        for message in chat:
            said = message["content"].strip()
            require_claim(
                said in text, f"the template does not render the message {said!r} of {name!r}"
            )
    return pass_check("every message of system, user and assistant is part of the text")


def tools_are_rendered(subject: CertifiedModel) -> Outcome:
    if not subject.template.conversation.renders_tools:
        raise NotApplicable("the template renders no tools")
    text = subject.encodings.text(CONVERSATIONS["one turn"][:1], tools=TOOLS)
    for part in (TOOLS[0]["function"]["name"], "city"):
        require_claim(
            part in text, f"the template reads tools, and {part!r} of a tool is not in the text"
        )
    rendered = _tool_conversation(subject)
    if rendered is None:
        return pass_check(
            "a tool is part of the prompt; the template rejects calls in a conversation"
        )
    escaped = rendered.replace('\\"', "\0")
    require_claim(
        "\0city" not in escaped,
        "the template encodes the arguments of a call twice: they are a JSON text in a JSON text",
    )
    for part in ("Cologne", "12 degrees"):
        require_claim(
            part in rendered,
            f"{part!r} of a tool call or of its result is not in the text of the conversation",
        )
    return pass_check("a tool, a call and its result are part of the text")


def thinking_can_be_chosen(subject: CertifiedModel) -> Outcome:
    if "enable_thinking" not in _source(subject):
        raise NotApplicable("the template does not read enable_thinking")
    chat = CONVERSATIONS["one turn"][:1]
    texts = {
        subject.encodings.text(chat, add_generation_prompt=True, enable_thinking=on)
        for on in (True, False)
    }
    require_claim(
        len(texts) == 2, "the template names enable_thinking, and the prompt does not change"
    )
    return pass_check("enable_thinking changes the prompt")


def _tool_conversation(subject: CertifiedModel) -> str | None:
    """Return the text of a conversation with a call; None if the template rejects calls."""
    arguments = {"city": "Cologne"}
    for call_arguments in (arguments, json.dumps(arguments)):
        try:
            return subject.encodings.text(tool_conversation(call_arguments), tools=TOOLS)
        except Exception:  # templates may raise any exception
            continue
    return None


def _require_equal(ours: Sequence[int], theirs: Sequence[int], problem: str) -> None:
    if list(ours) == list(theirs):
        return
    at = _differs(ours, theirs)
    raise Failed(f"{problem}, at token {at}: {[*ours[at : at + 4]]} and {[*theirs[at : at + 4]]}")


def _differs(first: Sequence[Any], second: Sequence[Any]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _source(subject: CertifiedModel) -> str:
    template = subject.template.tokenizer
    return str(template.chat_template)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


TEMPLATE_CHECKS = (
    ModelCheck("chat_template_files", "All files have the same chat template.", files_agree),
    ModelCheck(
        "chat_template_of_base", "The chat template is that of the base model.", equals_base
    ),
    ModelCheck(
        "chat_tokens",
        "Engine, trainer and transformers produce the same tokens for a conversation.",
        equal_tokens,
    ),
    ModelCheck(
        "conversation_shapes",
        "Trainer and engine produce the same tokens for conversations as clients write them.",
        shapes_have_equal_tokens,
    ),
    ModelCheck(
        "prompt_of_training",
        "The prompt of the engine is the beginning of the text that the trainer reads.",
        prompt_begins_training_text,
    ),
    ModelCheck(
        "generation_prompt",
        "The prompt ends where the answer begins.",
        prompt_ends_before_answer,
    ),
    ModelCheck("turns", "A further turn keeps the tokens of the earlier turns.", turns_keep_tokens),
    ModelCheck("messages", "The chat template renders every message.", messages_are_rendered),
    ModelCheck("tools", "The chat template renders tools, calls and results.", tools_are_rendered),
    ModelCheck("thinking", "enable_thinking changes the prompt.", thinking_can_be_chosen),
)
