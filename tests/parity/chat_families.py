"""Public chat templates, each with a small tokenizer that has the special tokens of its family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "chat_templates"

USER = {"role": "user", "content": "What is two plus two?"}
ANSWER = {"role": "assistant", "content": "Two plus two is four."}
SYSTEM = {"role": "system", "content": "You are brief."}
THOUGHT = {
    "role": "assistant",
    "content": "It is four.",
    "reasoning_content": "Two and two.",
    "thinking": "Two and two.",
}
AGAIN = {"role": "user", "content": "And three plus three?"}
SIX = {"role": "assistant", "content": "Six."}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    ],
}
RESULT = {"role": "tool", "name": "add", "content": "4"}

#: Rows by feature; columns other than `messages` are arguments of the template.
ROWS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER, ANSWER]},
    "several turns": {"messages": [USER, ANSWER, AGAIN, SIX]},
    "system": {"messages": [SYSTEM, USER, ANSWER]},
    "user last": {"messages": [USER, ANSWER, AGAIN]},
    "tools": {"messages": [USER, CALL, RESULT, ANSWER], "tools": [TOOL]},
    "thinking": {"messages": [USER, THOUGHT]},
    "thinking off": {
        "messages": [USER, ANSWER],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


@dataclass(frozen=True)
class Family:
    """A chat template and the tokens of its models.

    Attributes:
        name: File of the template.
        eos: End-of-text token.
        special: Other special tokens.
        bos: Beginning-of-text token, if any.
        plain: Added tokens that are not special.
        shows: Rows of `ROWS` that the template accepts in addition to plain chats.
        has_end: Whether the template ends an answer with an end token.
        end: Token that a model generates after an answer, if it is not `eos`.
        reference: File of TRL with the same template and marked answers, if any.
        marked_header: Beginning of an answer that TRL's marks include.
    """

    name: str
    eos: str
    special: tuple[str, ...] = ()
    bos: str | None = None
    plain: tuple[str, ...] = ()
    shows: tuple[str, ...] = ("system",)
    has_end: bool = True
    end: str | None = None
    reference: str | None = None
    marked_header: str = ""

    @property
    def template(self) -> str:
        """Return the Jinja text."""
        return (TEMPLATES / f"{self.name}.jinja").read_text("utf-8")

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows that the template accepts."""
        always = ("one turn", "several turns", "user last", "thinking off")
        return {name: row for name, row in ROWS.items() if name in (*always, *self.shows)}

    def tokenizer(self) -> Any:
        """Return a byte-level tokenizer with the tokens of the family."""
        from tokenizers import AddedToken, Tokenizer
        from transformers import PreTrainedTokenizerFast

        made = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(_bytes()),
            bos_token=self.bos,
            eos_token=self.eos,
            pad_token="<pad>",
            additional_special_tokens=list(self.special),
            clean_up_tokenization_spaces=False,
        )
        made.add_tokens([AddedToken(t, special=False, normalized=False) for t in self.plain])
        made.chat_template = self.template
        return made


_IM = ("<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>")
_ALL = ("system", "tools", "thinking")
FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", "<|im_end|>", _IM),
        Family(
            "qwen2_5",
            "<|im_end|>",
            (*_IM, "<|endoftext|>"),
            plain=_THINK,
            shows=("system", "tools"),
            reference="qwen2_5_training",
        ),
        Family("qwen3", "<|im_end|>", (*_IM, "<|endoftext|>"), plain=_THINK, shows=_ALL),
        Family("llama3", "<|eot_id|>", _HEADERS, "<|begin_of_text|>", reference="llama3_training"),
        Family(
            "llama3_1",
            "<|eot_id|>",
            (*_HEADERS, "<|end_of_text|>"),
            "<|begin_of_text|>",
            shows=("system", "tools"),
        ),
        Family(
            "gemma3",
            "<eos>",
            ("<start_of_turn>", "<end_of_turn>"),
            "<bos>",
            end="<end_of_turn>",
            reference="gemma3_training",
        ),
        Family("mistral", "</s>", ("[INST]", "[/INST]"), "<s>"),
        Family(
            "phi3",
            "<|endoftext|>",
            ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
            "<s>",
            end="<|end|>",
            reference="phi3_training",
        ),
        Family(
            "deepseekv3",
            "<｜end▁of▁sentence｜>",
            ("<｜User｜>", "<｜Assistant｜>"),
            "<｜begin▁of▁sentence｜>",
            plain=_THINK,
            shows=("system", "thinking"),
            reference="deepseekv3_training",
            marked_header="<｜Assistant｜>",
        ),
        Family(
            "deepseek_r1_distill",
            "<｜end▁of▁sentence｜>",
            ("<｜User｜>", "<｜Assistant｜>"),
            "<｜begin▁of▁sentence｜>",
            plain=_THINK,
            shows=("system", "thinking"),
        ),
        Family(
            "gptoss",
            "<|return|>",
            ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"),
            "<|startoftext|>",
            shows=_ALL,
            reference="gptoss_training",
            marked_header="<|start|>assistant",
        ),
        Family(
            "glm4moe",
            "<|endoftext|>",
            ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            plain=_THINK,
            shows=_ALL,
            has_end=False,
        ),
        Family(
            "command_r",
            "<|END_OF_TURN_TOKEN|>",
            ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
            "<BOS_TOKEN>",
            reference="cohere_training",
        ),
        Family("zephyr", "</s>", ("<|user|>", "<|assistant|>", "<|system|>"), "<s>"),
        Family("without_end", "<|endoftext|>", has_end=False),
    )
}


@cache
def _bytes() -> str:
    """Return a byte-level tokenizer with some merges, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([USER["content"], ANSWER["content"], "user assistant"] * 3, trainer)
    return made.to_str()
