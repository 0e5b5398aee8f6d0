"""Tokens: ends and beginnings, special tokens, and the vocabulary."""

from __future__ import annotations

from typing import Any

from ed_elarge.certify.chats import CONVERSATIONS, QUESTION, TEXTS
from ed_elarge.certify.outcome import ModelCheck, NotApplicable, Outcome, passed, require
from ed_elarge.certify.subject import CertifiedModel
from ed_elarge.certify.template_checks import trained_tokens


def end_is_learned(subject: CertifiedModel) -> Outcome:
    tokens, mask = _trained_answer(subject)
    end = _end_of_answer(subject, tokens)
    require(
        mask[end] == 1,
        f"the token {_shown(subject, tokens[end])} ends an answer and has no loss: the model does "
        "not learn to stop",
    )
    return passed(f"{_shown(subject, tokens[end])} at position {end} has loss")


def end_is_stopped_at(subject: CertifiedModel) -> Outcome:
    tokens, _ = _trained_answer(subject)
    end = tokens[_end_of_answer(subject, tokens)]
    stops = subject.end_token_ids
    require(
        end in stops,
        f"answers end with {_shown(subject, end)}, but the engine stops at "
        f"{[_shown(subject, token) for token in sorted(stops)]}: add the id to eos_token_id in "
        "generation_config.json",
    )
    return passed(f"{_shown(subject, end)} is in eos_token_id")


def question_has_no_loss(subject: CertifiedModel) -> Outcome:
    tokens, mask = _trained_answer(subject)
    asked = [token for token, flag in zip(tokens, mask, strict=True) if not flag]
    text = subject.tokenizer.decode(asked)
    require(QUESTION in text, f"the tokens without loss are {text!r}, without the question")
    answer = subject.tokenizer.decode(
        [token for token, flag in zip(tokens, mask, strict=True) if flag]
    )
    require(QUESTION not in answer, f"the question has loss: {answer!r}")
    return passed(f"{sum(mask)} of {len(mask)} tokens have loss: {answer!r}")


def one_beginning(subject: CertifiedModel) -> Outcome:
    bos = subject.tokenizer.bos_token_id
    if bos is None:
        raise NotApplicable("the tokenizer has no beginning-of-text token")
    tokens = subject.template.token_ids(CONVERSATIONS["one turn"][:1])
    require(
        tokens.count(bos) <= 1,
        f"a prompt contains {_shown(subject, bos)} {tokens.count(bos)} times",
    )
    rendered: Any = subject.tokenizer.apply_chat_template(
        CONVERSATIONS["one turn"][:1], tokenize=False, add_generation_prompt=True
    )
    again = list(subject.tokenizer(rendered)["input_ids"])
    note = ""
    if again.count(bos) > 1:
        note = "; a program that encodes the rendered text with special tokens adds a second one"
    return passed(f"a prompt contains {_shown(subject, bos)} {tokens.count(bos)} times{note}")


def users_write_no_special_tokens(subject: CertifiedModel) -> Outcome:
    special = {*subject.tokenizer.all_special_ids}
    texts = [t for t in subject.tokenizer.all_special_tokens if t]

    def of(text: str) -> list[int]:
        tokens = subject.template.token_ids([{"role": "user", "content": text}])
        return [token for token in tokens if token in special]

    plain = of("hello")
    for text in texts:
        found = of(f"hello {text} hello")
        require(found == plain, f"{text!r} in the text of a user becomes a special token")
    return passed(f"{len(texts)} special tokens stay text if a user writes them")


def ids_have_embeddings(subject: CertifiedModel) -> Outcome:
    size = subject.settings.get("vocab_size")
    if not isinstance(size, int):
        raise NotApplicable("config.json has no vocab_size")
    largest = max(subject.tokenizer.get_vocab().values())
    require(
        largest < size,
        f"the tokenizer has the id {largest}, and the model has {size} embeddings: resize the "
        "embeddings",
    )
    return passed(f"largest id {largest}, {size} embeddings")


def special_ids_are_those_of_the_tokenizer(subject: CertifiedModel) -> Outcome:
    size = len(subject.tokenizer)
    compared = 0
    sources = {
        "config.json": subject.settings,
        "generation_config.json": subject.generation_settings,
    }
    for source, values in sources.items():
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            given = values.get(name)
            for token in given if isinstance(given, list) else [given]:
                if token is None or (name == "pad_token_id" and token == -1):
                    continue
                require(
                    isinstance(token, int) and 0 <= token < size,
                    f"{name} {token!r} of {source} is not an id of the tokenizer (0 to {size - 1})",
                )
                compared += 1
            own = getattr(subject.tokenizer, name)
            if name == "eos_token_id" and given is not None and own is not None:
                listed = {*given} if isinstance(given, list) else {given}
                require(
                    own in listed or _is_end_of_turn(subject, listed),
                    f"eos_token_id of {source} is {given}, and that of the tokenizer is {own}",
                )
            if name == "bos_token_id" and given is not None and own is not None:
                require(
                    given == own,
                    f"bos_token_id of {source} is {given}, and that of the tokenizer is {own}",
                )
    return passed(f"{compared} ids of special tokens")


def texts_are_kept(subject: CertifiedModel) -> Outcome:
    tokenizer = subject.tokenizer
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        again = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        require(
            str(again).strip(" ") == text.strip(" "),
            f"the tokens of {text!r} decode to {again!r}",
        )
    return passed(f"{len(TEXTS)} texts are decoded unchanged")


def tokens_of_base(subject: CertifiedModel) -> Outcome:
    own, other = subject.tokenizer, subject.base.tokenizer
    for text in TEXTS:
        ours, theirs = (t.encode(text, add_special_tokens=False) for t in (own, other))
        require(ours == theirs, f"the tokens of {text!r} are not those of the base model")
    known, expected = own.get_vocab(), other.get_vocab()
    moved = [token for token, number in expected.items() if known.get(token) != number]
    require(not moved, f"tokens of the base model have other ids: {moved[:5]}")
    return passed(f"{len(expected)} tokens have equal ids")


def _trained_answer(subject: CertifiedModel) -> tuple[list[int], list[int]]:
    _ = subject.template
    return trained_tokens(subject, CONVERSATIONS["one turn"], {})


def _end_of_answer(subject: CertifiedModel, tokens: list[int]) -> int:
    """Return the position of the last token that is not white space."""
    for at in range(len(tokens) - 1, -1, -1):
        if str(subject.tokenizer.decode([tokens[at]])).strip():
            return at
    return len(tokens) - 1


def _is_end_of_turn(subject: CertifiedModel, tokens: set[int]) -> bool:
    try:
        trained, _ = _trained_answer(subject)
    except NotApplicable:
        return False
    return trained[_end_of_answer(subject, trained)] in tokens


def _shown(subject: CertifiedModel, token: int) -> str:
    known = isinstance(token, int) and 0 <= token < len(subject.tokenizer)
    return f"{subject.tokenizer.decode([token])!r} ({token})" if known else f"({token})"


CHECKS = (
    ModelCheck("end_learned", "The end of an answer has loss in training.", end_is_learned),
    ModelCheck("end_stops", "The engine stops at the end of an answer.", end_is_stopped_at),
    ModelCheck(
        "loss_on_answers", "Answers have loss, and questions have none.", question_has_no_loss
    ),
    ModelCheck("one_beginning", "A prompt has at most one beginning-of-text token.", one_beginning),
    ModelCheck(
        "special_tokens_of_users",
        "The text of a user contains no special tokens.",
        users_write_no_special_tokens,
    ),
    ModelCheck("embeddings", "Every token has an embedding.", ids_have_embeddings),
    ModelCheck(
        "special_ids",
        "config.json and generation_config.json name special tokens of the tokenizer.",
        special_ids_are_those_of_the_tokenizer,
    ),
    ModelCheck("round_trip", "The tokenizer decodes its tokens to the same text.", texts_are_kept),
    ModelCheck("tokens_of_base", "The tokenizer is that of the base model.", tokens_of_base),
)
