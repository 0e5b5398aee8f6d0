"""How byte-level vocabularies divide a text before merges: `tokenizer.ggml.pre`.

llama.cpp names a division; `tokenizers` describes it. The regular expressions are those of the
published tokenizers, which llama.cpp quotes in `src/llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _build_case_pattern(end: str) -> str:
    """Words that start with capital letters, or consist of them."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{end}|{start}{_UPPER}+{_LOWER}*{end}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = _build_case_pattern("") + rf"|\p{{N}}|{_SLASHED}"
GPT4O = _build_case_pattern(f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}|{_SLASHED}"
_IDEOGRAPHS = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters of alphabets with upper and lower case.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ"
    "-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK"
    "-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-"
    "𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_THREE_DIGITS = "[0-9][0-9][0-9]"
BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"


class Division(NamedTuple):
    """Regular expressions that are applied one after another.

    Attributes:
        patterns: matches become parts of their own.
        ignore_merges: a part that is a token stays whole, whatever the merges.
        digits: single digits are parts of their own.
        gpt2: GPT-2's expression divides the parts further.
        bos: texts start with the token for the start of a text, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    digits: bool = False
    gpt2: bool = False
    bos: bool = False


#: Name -> division. A name that is not here is an error.
DIVISIONS: Mapping[str, Division] = {
    # A file without a name: llama.cpp divides its texts so.
    "default": Division((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", _THREE_DIGITS)),
    "gpt-2": Division((), gpt2=True),
    "llama-bpe": Division((LLAMA3,), ignore_merges=True, bos=True),
    "tekken": Division((TEKKEN,), ignore_merges=True, bos=True),
    "qwen2": Division((QWEN2,)),
    "qwen35": Division((QWEN35,)),
    "stablelm2": Division((QWEN2,)),
    "dbrx": Division((LLAMA3,)),
    "chatglm-bpe": Division((LLAMA3,)),
    "glm4": Division((LLAMA3,), ignore_merges=True),
    "gpt-4o": Division((GPT4O,)),
    "deepseek-v3": Division((r"\p{N}{1,3}", _IDEOGRAPHS, DEEPSEEK3)),
    "deepseek-coder": Division(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-llm": Division(DEEPSEEK_LLM),
    "falcon": Division((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, _THREE_DIGITS)),
    "starcoder": Division((), digits=True, gpt2=True),
    "bloom": Division((BLOOM,)),
}
#: Other names of the same divisions.
SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"), "llama-bpe"),
    **dict.fromkeys(("phi-2", "modern-bert", "roberta-bpe", "mpt", "olmo", "jais"), "gpt-2"),
    **dict.fromkeys(("exaone4", "trillion", "granite-docling", "gigachat", "mellum"), "gpt-2"),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "jina-v2-es", "jina-v2-de"), "gpt-2"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "hunyuan", "solar-open", "grok-2"), "qwen2"),
    **dict.fromkeys(("smaug-bpe",), "dbrx"),
    **dict.fromkeys(("glm5",), "glm4"),
    **dict.fromkeys(("llama4", "kanana2", "minimax-m2"), "gpt-4o"),
    **dict.fromkeys(("hunyuan-dense", "joyai-llm"), "deepseek-v3"),
    **dict.fromkeys(("refact", "command-r", "smollm", "codeshell", "exaone"), "starcoder"),
    **dict.fromkeys(("minerva-7b", "mellum2"), "starcoder"),
    **dict.fromkeys(("poro-chat", "gpt3-finnish"), "bloom"),
}


def build_pretokenizer_steps(division: Division) -> list[dict[str, Any]]:
    """Return the pre-tokenizers of a division, as tokenizer.json has them."""
    steps: list[dict[str, Any]] = []
    if division.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    for pattern in division.patterns:
        steps.append(
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    steps.append(
        {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": division.gpt2,
        }
    )
    return steps


def find_division_name(pre_tokenizer: object, *, ignore_merges: bool) -> str | None:
    """Return the name of the division of a tokenizer; None if llama.cpp has no name for it.

    Args:
        pre_tokenizer: the entry of tokenizer.json.
        ignore_merges: the option of its model.
    """
    entry = pre_tokenizer if isinstance(pre_tokenizer, dict) else {}
    steps = entry.get("pretokenizers") if entry.get("type") == "Sequence" else [entry]
    essences = [_essence(step) for step in steps or []]
    matches = [
        name
        for name, division in DIVISIONS.items()
        if [_essence(step) for step in build_pretokenizer_steps(division)] == essences
    ]
    exact = [name for name in matches if DIVISIONS[name].ignore_merges == ignore_merges]
    return next(iter(exact or matches), None)


def _essence(step: dict[str, Any]) -> tuple[object, ...]:
    """The part of a step that decides how a text is divided."""
    kind = step.get("type")
    if kind == "Split":
        pattern = step.get("pattern") or {}
        text = pattern.get("Regex") or pattern.get("String")
        return (kind, text, step.get("behavior"), bool(step.get("invert")))
    if kind == "ByteLevel":
        return (kind, bool(step.get("add_prefix_space")), bool(step.get("use_regex", True)))
    return (kind, bool(step.get("individual_digits")))
