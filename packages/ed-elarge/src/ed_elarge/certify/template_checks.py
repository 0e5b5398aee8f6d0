"""The chat template: its files, and the tokens of trainer, engine and transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ed_elarge.certify.chats import CONVERSATIONS, TOOLS, SampleChat
from ed_elarge.certify.outcome import Failed, ModelCheck, NotApplicable, Outcome, passed, require
from ed_elarge.certify.subject import CertifiedModel, read_json


def files_agree(subject: CertifiedModel) -> Outcome:
    folder, found = subject.folder, {}
    if (folder / "chat_template.jinja").is_file():
        text = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        found["chat_template.jinja"] = text
    for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
        if (folder / name).is_file():
            stored = read_json(folder / name).get("chat_template")
            if isinstance(stored, str):
                found[name] = stored
    if not found:
        raise NotApplicable("no file contains a chat template")
    shown = ", ".join(f"{name} {_digest(text)}" for name, text in found.items())
    require(len({*found.values()}) == 1, f"the files have different templates: {shown}")
    return passed(shown)


def equals_base(subject: CertifiedModel) -> Outcome:
    own, other = _source(subject), _source(subject.base)
    require(
        own == other,
        f"the template has SHA-256 {_digest(own)}, that of the base model {_digest(other)}; they "
        f"differ from character {_differs(own, other)}",
    )
    return passed(f"SHA-256 {_digest(own)}")


def equal_tokens(subject: CertifiedModel) -> Outcome:
    """Compare the tokens of engine, trainer and transformers."""
    count = 0
    for name, chat, options in _cases(subject):
        theirs = _of_transformers(subject, chat[:-1], add_generation_prompt=True, **options)
        ours = subject.template.token_ids(chat[:-1], **options)
        _require_equal(ours, theirs, f"engine and transformers differ in {name!r}")
        whole = _of_transformers(subject, chat, **options)
        trained = trained_tokens(subject, chat, options)[0]
        _require_equal(trained[: len(whole)], whole, f"trainer and transformers differ in {name!r}")
        count += 1
    return passed(f"{count} conversations have equal tokens")


def prompt_begins_training_text(subject: CertifiedModel) -> Outcome:
    count = 0
    for name, chat, options in _cases(subject):
        prompt = subject.template.token_ids(chat[:-1], **options)
        trained = trained_tokens(subject, chat, options)[0]
        _require_equal(
            trained[: len(prompt)],
            prompt,
            f"the prompt of the engine is not the beginning of the trained text in {name!r}",
        )
        count += 1
    return passed(f"{count} prompts are beginnings of the trained texts")


def turns_keep_tokens(subject: CertifiedModel) -> Outcome:
    chat = CONVERSATIONS["several turns"]
    first = _of_transformers(subject, chat[:2])
    second = _of_transformers(subject, chat[:3], add_generation_prompt=True)
    # A template may write an end token only after the last turn.
    shared = _differs(first, second)
    missing = subject.tokenizer.decode(first[shared:])
    require(
        len(first) - shared <= 2,
        f"the tokens of the first turn change when a second turn follows, from token {shared} of "
        f"{len(first)}: {missing!r}",
    )
    return passed(f"{shared} of {len(first)} tokens of the first turn stay")


def answers_are_rendered(subject: CertifiedModel) -> Outcome:
    for name, chat, options in _cases(subject):
        text = subject.tokenizer.decode(_of_transformers(subject, chat, **options))
        for message in chat:
            if message["role"] != "system":
                said = message["content"].strip()
                require(
                    said in text, f"the template does not render the message {said!r} of {name!r}"
                )
    return passed("every message of user and assistant is part of the text")


def trained_tokens(
    subject: CertifiedModel, chat: SampleChat, options: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat and their loss mask, as the trainer reads them."""
    from ed_data.errors import DataError
    from ed_data.tokens.chats import ChatEncoder
    from ed_data.tokens.items import DocumentField

    eos: Any = subject.tokenizer.eos_token_id
    if eos is None:
        raise NotApplicable("the tokenizer has no end-of-text token")
    encoder = ChatEncoder(subject.tokenizer, eos, assistant_only_loss=True)
    item: Any = DocumentField(chat, "the conversation", options)
    try:
        tokens = encoder.whole([item])[0]
    except DataError as error:
        raise Failed(f"the trainer cannot read a conversation: {error}") from error
    return list(tokens.ids), list(tokens.mask or [])


def _cases(subject: CertifiedModel) -> list[tuple[str, SampleChat, dict[str, Any]]]:
    """Return the conversations that the template renders, with its options."""
    cases: list[tuple[str, SampleChat, dict[str, Any]]] = []
    for name, chat in CONVERSATIONS.items():
        try:
            _of_transformers(subject, chat)
        except Exception:  # templates may raise any exception, e.g. for a system message
            continue
        cases.append((name, chat, {}))
    if not cases:
        raise Failed("the template renders none of the conversations")
    if subject.template.renders_tools:
        cases.append(("tools", CONVERSATIONS["one turn"], {"tools": TOOLS}))
    return cases


def _of_transformers(subject: CertifiedModel, chat: SampleChat, **options: Any) -> list[int]:
    _ = subject.template  # without a template the check is not applicable
    given: Any = {"tokenize": True, "return_dict": True, **options}
    output: Any = subject.tokenizer.apply_chat_template(chat, **given)
    return list(output["input_ids"])


def _require_equal(ours: Sequence[int], theirs: Sequence[int], problem: str) -> None:
    if list(ours) == list(theirs):
        return
    at = _differs(ours, theirs)
    raise Failed(f"{problem}, at token {at}: {[*ours[at : at + 4]]} and {[*theirs[at : at + 4]]}")


def _differs(first: Sequence[Any], second: Sequence[Any]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _source(subject: CertifiedModel) -> str:
    template: Any = subject.template.tokenizer
    return str(template.chat_template)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


CHECKS = (
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
        "prompt_of_training",
        "The prompt of the engine is the beginning of the text that the trainer reads.",
        prompt_begins_training_text,
    ),
    ModelCheck("turns", "A further turn keeps the tokens of the earlier turns.", turns_keep_tokens),
    ModelCheck("messages", "The chat template renders every message.", answers_are_rendered),
)
