"""Tokens: ends and beginnings, special tokens, and the vocabulary."""

from __future__ import annotations

import numpy as np
from ed_infra.enums import TaskType

from ed_elarge.certify.chats import ANSWER, CONVERSATIONS, QUESTION, TEXTS
from ed_elarge.certify.outcome import ModelCheck, NotApplicable, Outcome, pass_check, require_claim
from ed_elarge.certify.subject import CertifiedModel, read_json

#: Endings of the names of tensors with a row for each token.
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def end_is_learned(subject: CertifiedModel) -> Outcome:
    tokens, mask = _trained_answer(subject)
    end = _end_of_answer(subject, tokens)
    require_claim(
        mask[end] == 1,
        f"the token {_describe_token(subject, tokens[end])} ends an answer and has no loss: the "
        "model does "
        "not learn to stop",
    )
    return pass_check(f"{_describe_token(subject, tokens[end])} at position {end} has loss")


def end_is_stopped_at(subject: CertifiedModel) -> Outcome:
    tokens, _ = _trained_answer(subject)
    end = tokens[_end_of_answer(subject, tokens)]
    stops = subject.end_token_ids
    require_claim(
        end in stops,
        f"answers end with {_describe_token(subject, end)}, but the engine stops at "
        f"{[_describe_token(subject, token) for token in sorted(stops)]}: add the id to "
        "eos_token_id in "
        "generation_config.json",
    )
    return pass_check(f"{_describe_token(subject, end)} is in eos_token_id")


def padding_is_no_end(subject: CertifiedModel) -> Outcome:
    pad = subject.tokenizer.pad_token_id
    if pad is None:
        raise NotApplicable("the tokenizer has no padding token")
    tokens, _ = _trained_answer(subject)
    end = tokens[_end_of_answer(subject, tokens)]
    require_claim(
        pad != end,
        f"{_describe_token(subject, pad)} is the padding token and ends answers: trainers that "
        "mask the "
        "padding token never train the end of an answer",
    )
    return pass_check(
        f"answers end with {_describe_token(subject, end)}, padding is "
        f"{_describe_token(subject, pad)}"
    )


def end_is_not_shown(subject: CertifiedModel) -> Outcome:
    tokens = _after_answer(subject)
    visible_text = str(subject.tokenizer.decode(tokens, skip_special_tokens=True))
    require_claim(
        not visible_text.strip(),
        f"an answer is followed by {visible_text!r}, which are no special tokens of the tokenizer: "
        "replies contain this text",
    )
    return pass_check(f"{subject.tokenizer.decode(tokens)!r} follows an answer, and is not shown")


def question_has_no_loss(subject: CertifiedModel) -> Outcome:
    tokens, mask = _trained_answer(subject)
    prompt_tokens = [token for token, flag in zip(tokens, mask, strict=True) if not flag]
    text = subject.tokenizer.decode(prompt_tokens)
    require_claim(QUESTION in text, f"the tokens without loss are {text!r}, without the question")
    answer = subject.tokenizer.decode(
        [token for token, flag in zip(tokens, mask, strict=True) if flag]
    )
    require_claim(QUESTION not in answer, f"the question has loss: {answer!r}")
    return pass_check(f"{sum(mask)} of {len(mask)} tokens have loss: {answer!r}")


def one_beginning(subject: CertifiedModel) -> Outcome:
    bos = subject.tokenizer.bos_token_id
    if bos is None:
        raise NotApplicable("the tokenizer has no beginning-of-text token")
    tokens = subject.encodings.encode_with_engine(CONVERSATIONS["one turn"][:1])
    more_turns = subject.encodings.encode_with_engine(CONVERSATIONS["several turns"][:3])
    begins_turns = more_turns.count(bos) > tokens.count(bos)  # as <|im_start|> of SmolLM2
    require_claim(
        tokens[:2].count(bos) < 2 and (begins_turns or tokens.count(bos) <= 1),
        f"a prompt contains {_describe_token(subject, bos)} {tokens.count(bos)} times",
    )
    rendered = subject.encodings.text(CONVERSATIONS["one turn"][:1], add_generation_prompt=True)
    reencoded_tokens = list(subject.tokenizer(rendered)["input_ids"])
    note = ""
    if reencoded_tokens.count(bos) > max(1, tokens.count(bos)):
        note = "; a program that encodes the rendered text with special tokens adds a second one"
    return pass_check(
        f"a prompt contains {_describe_token(subject, bos)} {tokens.count(bos)} times{note}"
    )


def users_write_no_special_tokens(subject: CertifiedModel) -> Outcome:
    special = _special_ids(subject) | {
        token for token in _after_answer(subject) if token in subject.tokenizer.added_tokens_decoder
    }
    texts = [str(subject.tokenizer.decode([token])) for token in sorted(special)]
    texts = [text for text in texts if text.strip()]

    def of(text: str) -> list[int]:
        tokens = subject.encodings.encode_with_engine([{"role": "user", "content": text}])
        return [token for token in tokens if token in special]

    expected_tokens = of("hello")
    for text in texts:
        special_tokens = of(f"hello {text} hello")
        require_claim(
            special_tokens == expected_tokens,
            f"{text!r} in the text of a user becomes a special token",
        )
    return pass_check(f"{len(texts)} special tokens stay text if a user writes them")


def ids_have_embeddings(subject: CertifiedModel) -> Outcome:
    size = subject.settings.get("vocab_size")
    if not isinstance(size, int):
        raise NotApplicable("config.json has no vocab_size")
    largest = max(subject.tokenizer.get_vocab().values())
    require_claim(
        largest < size,
        f"the tokenizer has the id {largest}, and the model has {size} embeddings: add rows "
        "before training (model: {resize_token_embeddings: true})",
    )
    return pass_check(f"largest id {largest}, {size} embeddings")


def special_ids_are_those_of_the_tokenizer(subject: CertifiedModel) -> Outcome:
    size = len(subject.tokenizer)
    compared = 0
    sources = {
        "config.json": subject.settings,
        "generation_config.json": subject.generation_settings,
    }
    for source, values in sources.items():
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            special_ids = values.get(name)
            for token in special_ids if isinstance(special_ids, list) else [special_ids]:
                if token is None or (name == "pad_token_id" and token == -1):
                    continue
                require_claim(
                    isinstance(token, int) and 0 <= token < size,
                    f"{name} {token!r} of {source} is not an id of the tokenizer (0 to {size - 1})",
                )
                compared += 1
            tokenizer_id = getattr(subject.tokenizer, name)
            if name == "eos_token_id" and special_ids is not None and tokenizer_id is not None:
                listed = {*special_ids} if isinstance(special_ids, list) else {special_ids}
                require_claim(
                    tokenizer_id in listed or _is_end_of_turn(subject, listed),
                    f"eos_token_id of {source} is {special_ids}, and that of the tokenizer is "
                    f"{tokenizer_id}",
                )
            if name == "bos_token_id" and special_ids is not None and tokenizer_id is not None:
                require_claim(
                    special_ids == tokenizer_id,
                    f"bos_token_id of {source} is {special_ids}, and that of the tokenizer is "
                    f"{tokenizer_id}",
                )
    return pass_check(f"{compared} ids of special tokens")


def texts_are_kept(subject: CertifiedModel) -> Outcome:
    if subject.task == TaskType.CTC:
        raise NotApplicable("the labels of CTC are only the characters of its transcripts")
    tokenizer = subject.tokenizer
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        decoded_text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        require_claim(
            str(decoded_text).strip(" ") == text.strip(" "),
            f"the tokens of {text!r} decode to {decoded_text!r}",
        )
    return pass_check(f"{len(TEXTS)} texts are decoded unchanged")


def prompts_stay_whole(subject: CertifiedModel) -> Outcome:
    path = subject.folder / "tokenizer.json"
    if not path.is_file():
        raise NotApplicable("there is no tokenizer.json")
    stored = read_json(path)
    for name, effect in (("truncation", "cut every text"), ("padding", "pad every text")):
        require_claim(
            not stored.get(name),
            f"tokenizer.json contains {name} {stored.get(name)}: programs that apply the file "
            f"{effect}",
        )
    return pass_check("tokenizer.json neither cuts nor pads texts")


def template_tokens_are_trained(subject: CertifiedModel) -> Outcome:
    tensors = subject.tensors
    tables = [name for name in tensors if name.endswith(EMBEDDINGS)]
    if not tables:
        raise NotApplicable("no tensor is named as an embedding of tokens")
    used = sorted(_special_ids(subject) & {*_trained_answer(subject)[0]})
    for name in tables:
        rows = tensors[name].shape[0]
        for token in (token for token in used if token < rows):
            require_claim(
                bool(np.any(np.asarray(tensors.read(name, (slice(token, token + 1),))))),
                f"the row of {_describe_token(subject, token)} in {name} is 0: the chat template "
                "uses a "
                "token that was never trained",
            )
    return pass_check(f"{len(used)} special tokens of the template have embeddings that are not 0")


def tokens_of_base(subject: CertifiedModel) -> Outcome:
    tokenizer, base_tokenizer = subject.tokenizer, subject.base.tokenizer
    for text in TEXTS:
        ours, theirs = (
            t.encode(text, add_special_tokens=False) for t in (tokenizer, base_tokenizer)
        )
        require_claim(ours == theirs, f"the tokens of {text!r} are not those of the base model")
    for name, chat in CONVERSATIONS.items():
        try:
            text = subject.encodings.text(chat)
        except NotApplicable:
            break
        except Exception:  # templates may raise any exception
            continue
        ours, theirs = (
            t.encode(text, add_special_tokens=False) for t in (tokenizer, base_tokenizer)
        )
        require_claim(
            ours == theirs, f"the tokens of the conversation {name!r} differ from the base's"
        )
    vocab, expected = tokenizer.get_vocab(), base_tokenizer.get_vocab()
    moved = [token for token, number in expected.items() if vocab.get(token) != number]
    require_claim(not moved, f"tokens of the base model have other ids: {moved[:5]}")
    return pass_check(f"{len(expected)} tokens have equal ids")


def _trained_answer(subject: CertifiedModel) -> tuple[list[int], list[int]]:
    return subject.encodings.encode_with_trainer(CONVERSATIONS["one turn"])


def _end_of_answer(subject: CertifiedModel, tokens: list[int]) -> int:
    """Return the position of the last token that is not white space."""
    for at in range(len(tokens) - 1, -1, -1):
        if str(subject.tokenizer.decode([tokens[at]])).strip():
            return at
    return len(tokens) - 1


def _after_answer(subject: CertifiedModel) -> list[int]:
    """Return the tokens that the trainer reads after an answer."""
    tokens, _ = _trained_answer(subject)
    for at in range(len(tokens), 0, -1):
        if ANSWER.endswith(str(subject.tokenizer.decode(tokens[at - 1 : at])).strip() or "\0"):
            return tokens[at:]
    raise NotApplicable("the answer is not found in the tokens of the trainer")


def _special_ids(subject: CertifiedModel) -> set[int]:
    added = getattr(subject.tokenizer, "added_tokens_decoder", {})
    special = {number for number, token in added.items() if token.special}
    return special | {*subject.tokenizer.all_special_ids}


def _is_end_of_turn(subject: CertifiedModel, tokens: set[int]) -> bool:
    try:
        trained, _ = _trained_answer(subject)
    except NotApplicable:
        return False
    return trained[_end_of_answer(subject, trained)] in tokens


def _describe_token(subject: CertifiedModel, token: int) -> str:
    is_known = isinstance(token, int) and 0 <= token < len(subject.tokenizer)
    return f"{subject.tokenizer.decode([token])!r} ({token})" if is_known else f"({token})"


TOKEN_CHECKS = (
    ModelCheck("end_learned", "The end of an answer has loss in training.", end_is_learned),
    ModelCheck("end_stops", "The engine stops at the end of an answer.", end_is_stopped_at),
    ModelCheck("padding", "The padding token does not end answers.", padding_is_no_end),
    ModelCheck("end_hidden", "The end of an answer is not part of a reply.", end_is_not_shown),
    ModelCheck(
        "loss_on_answers", "Answers have loss, and questions have none.", question_has_no_loss
    ),
    ModelCheck(
        "one_beginning", "A prompt begins with at most one beginning-of-text token.", one_beginning
    ),
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
    ModelCheck("whole_prompts", "The tokenizer neither cuts nor pads texts.", prompts_stay_whole),
    ModelCheck(
        "template_tokens",
        "The special tokens of the chat template have embeddings.",
        template_tokens_are_trained,
    ),
    ModelCheck("tokens_of_base", "The tokenizer is that of the base model.", tokens_of_base),
)
