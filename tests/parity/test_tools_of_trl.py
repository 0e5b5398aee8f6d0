"""Tools of GRPO: schemas, tokens, masks and messages equal those of TRL's trainer.

Both trainers get the same scripted replies of a model. A reply has the text that the chat template
writes for a message with calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ed_data import train_bpe
from ed_elarge.building.tools import build_tool_set
from ed_infra.testing import require_torch
from ed_trainers.online.completions import build_completions
from ed_trainers.online.episodes import build_episode_factory, sample_episodes
from ed_trainers.options.groups import GRPOArguments
from ed_trainers.rollout import Sampled, SampleRequest

pytestmark = pytest.mark.torch
#: Chat template of TRL -> its end token.
TEMPLATES = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def multiply(a: int, b: int = 2) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def find_capital(country: str, names: list[str] | None = None) -> str:
    """
    Find the capital of a country.

    Args:
        country: The country.
        names: Candidates.
    """
    if country != "France":
        raise LookupError(f"no country {country!r}")
    return "Paris"


async def wait(seconds: float) -> str:
    """
    Wait.

    Args:
        seconds: The duration.
    """
    return f"waited {seconds}"


TOOLS = [multiply, find_capital, wait]
Call = tuple[str, dict[str, Any]]
#: The replies of each sample: calls of each message, or a text. Llama's template has one call.
SCRIPTS: list[list[list[Call] | str]] = [
    [[("multiply", {"a": 6, "b": 7})], "It is 42."],
    [[("multiply", {"a": 6})], [("find_capital", {"country": "France"})], "Paris, and 12."],
    ["I know it: 42."],
    [[("find_capital", {"country": "Mars"})], "There is none."],
    [[("multiply", {"b": 1})], "An argument was missing."],
    [[("divide", {"a": 1})], "There is no such tool."],
    [[("wait", {"seconds": 0.5})], [("wait", {"seconds": 1.5})], [("wait", {"seconds": 2.5})]],
]
SEVERAL: list[list[Call] | str] = [
    [("multiply", {"a": 2, "b": 2}), ("find_capital", {"country": "Rome"})],
    "Two results.",
]
PROMPT = [{"role": "user", "content": "How much is 6 * 7?"}]
ROUNDS, LENGTH = 2, 400


def build_tokenizer(name: str) -> Any:
    import trl

    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    tokenizer = train_bpe([template], 400, special_tokens=SPECIAL)
    tokenizer.chat_template = template
    tokenizer.eos_token = TEMPLATES[name]
    return tokenizer


def write_reply(tokenizer: Any, reply: list[Call] | str) -> list[int]:
    """Return the tokens of a message as a model writes it."""
    message: dict[str, Any] = {"role": "assistant", "content": reply}
    if not isinstance(reply, str):
        calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in reply
        ]
        message |= {"content": "", "tool_calls": calls}

    def render(chat: list[Any], **options: bool) -> str:
        return tokenizer.apply_chat_template(chat, tokenize=False, **options)

    before, text = render(PROMPT, add_generation_prompt=True), render([*PROMPT, message])
    assert text.startswith(before)
    end = tokenizer.eos_token
    return tokenizer.encode(text[len(before) : text.rindex(end)] + end, add_special_tokens=False)


class Script:
    """Returns the next reply of each sample. A sample is found by the tokens before the reply."""

    def __init__(self, prompt: list[int], replies: Sequence[Sequence[list[int]]]) -> None:
        self._replies = {i: list(each) for i, each in enumerate(replies)}
        self._prompt, self._samples = prompt, dict[tuple[int, ...], int]()

    def next(self, prefixes: Sequence[Sequence[int]]) -> list[list[int]]:
        first = all(list(prefix) == self._prompt for prefix in prefixes)
        out = []
        for place, prefix in enumerate(prefixes):
            begins = [p for p in self._samples if tuple(prefix[: len(p)]) == p]
            sample = place if first else self._samples[max(begins, key=len)]
            out.append(self._replies[sample].pop(0))
            self._samples[(*prefix, *out[-1])] = sample
        return out

    def generate(self, prompts: Any, params: Mapping[str, Any], weights: Any, **more: Any) -> Any:
        return [Sampled(ids, [-1.0] * len(ids), 0) for ids in self.next(prompts)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", TEMPLATES)
def test_schemas_tokens_masks_and_messages_equal_trl(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_torch()
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = build_tokenizer(name)
    # Each sample starts with another digit, so that its later replies are found.
    scripts = [*SCRIPTS, *([] if name.startswith("llama") else [SEVERAL])]
    replies = [[write_reply(tokenizer, reply) for reply in script] for script in scripts]
    options = GRPOArguments(tools=["m:f"], reward_functions=["m:f"], max_completion_length=LENGTH)
    tools = build_tool_set(TOOLS, tokenizer, options)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer = GRPOTrainer(
        transformers.LlamaForCausalLM(config),
        reward_funcs=lambda completions, **fields: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_completion_length=LENGTH,
            max_tool_calling_iterations=ROUNDS,
            num_generations=2,
            per_device_train_batch_size=2,
        ),
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * 2),
        processing_class=tokenizer,
        tools=list(TOOLS),
    )
    count = len(scripts)
    prompt_ids, _, _ = trainer._tokenize_prompts([PROMPT])
    script = Script(prompt_ids[0], replies)
    functions = {"multiply": multiply, "find_capital": find_capital}
    trainer._sync_tool_dicts = [functions] * count
    trainer._async_tool_dicts = [{"wait": wait}] * count

    def generate(prefixes: Any, *values: Any, **more: Any) -> Any:
        out = script.next(prefixes)
        return out, [[-1.0] * len(ids) for ids in out]

    monkeypatch.setattr(trainer, "_generate_single_turn", generate)
    theirs = trainer._generate([PROMPT] * count)
    their_prompts, their_ids, their_masks, their_messages = theirs[:4]

    ids = tokenizer.apply_chat_template(
        PROMPT, tools=list(tools.schemas), add_generation_prompt=True, return_dict=False
    )
    assert ids == their_prompts[0]
    request = SampleRequest(
        0, [ids], count, {"max_tokens": LENGTH}, [0] * count, [{"prompt": PROMPT}]
    )
    begin = build_episode_factory(None, (), lambda: tokenizer, ROUNDS + 1, tools)
    assert begin is not None
    samples = sample_episodes(Script(ids, replies), request, SimpleNamespace(version=0), begin, {})
    batch = SimpleNamespace(input_ids=[ids], prompts=[PROMPT])
    ours = build_completions(batch, [ids], samples, count, tokenizer, tools.read)
    assert ours.completion_ids == their_ids
    masks = [[1] * len(each) for each in ours.completion_ids]
    for mask, spans in zip(masks, ours.given, strict=True):
        for first, length in spans:
            mask[first : first + length] = [0] * length
    assert masks == their_masks
    assert [list(map(simplify, one)) for one in ours.completions] == [
        list(map(simplify, one)) for one in their_messages
    ]
    limited = [len(script) > ROUNDS and not isinstance(script[-1], str) for script in scripts]
    assert ours.ended == [not one for one in limited]
    figures = trainer._metrics["train"]
    assert ours.figures()["tools/call_frequency"] * count == pytest.approx(
        figures["tools/call_frequency"][0] * count + sum(limited)
    )
    assert ours.rewards is None


def simplify(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a message that both trainers have."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return {
        "role": message["role"],
        "name": message.get("name"),
        "content": (message.get("content") or "").strip(),
        "calls": calls,
    }
