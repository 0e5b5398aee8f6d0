"""Run files of `elarge init`: a commented file for each method and each action.

A file is complete: its small model and its example data make it run in seconds. The comments state
how to replace them.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

import yaml
from ed_data.kinds import ROW_KINDS
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, did_you_mean
from ed_trainers.arguments import METHODS, TrainingArguments
from ed_trainers.options.online import RewardedArguments

from ed_elarge.config.reference import describe_default, read_meanings
from ed_elarge.config.sections import WITHOUT_TEXT
from ed_elarge.config.table import ACTIONS, canonical_action

#: Kind of rows -> the list of `ed_elarge.example_data`, and the fields of a row.
_ROWS = {
    "text": ("texts", "content: a text, or a list of chat messages"),
    "prompt": ("prompts", "prompt: a text, or a list of chat messages"),
    "preference": ("preferences", "prompt, chosen and rejected"),
    "gold_preference": ("triples", "prompt, chosen, rejected and reference (a right answer)"),
    "reward": ("preferences", "prompt, chosen and rejected"),
    "labelled": ("labelled", "prompt, completion and label (true: a good answer)"),
    "steps": ("steps", "prompt, completions (the steps) and labels (one for each step)"),
    "embedding": ("meanings", "anchor and positive"),
    "classification": ("opinions", "text, text_pair and label"),
    "relevance": ("relevance", "query, document and label (1: relevant)"),
    "question_answering": ("questions", "question, context and answers, as in SQuAD"),
    "choice": ("choices", "question, choices and label (the number of a choice)"),
    "token_classification": ("entities", "tokens (words) and labels (one for each word)"),
    "image_classification": ("drawings", "image (a path or bytes) and label"),
    "image_text": ("drawings", "image (a path or bytes) and text"),
}
#: Method whose rows have more fields than their kind -> the list, and the fields of a row.
_ROWS_OF_METHODS = {
    "sdft": ("demonstrations", "prompt, and privileged_context: a demonstration for the teacher"),
}
#: Classifiers of texts, which are usually encoders.
_ENCODED = ("sequence_classification", "cross_encoder")
#: Options that a method needs for its example data.
_NEEDED: dict[str, dict[str, Any]] = {
    "gkd": {"lmbda": 1.0},  # every completion is the student's
    "question_answering": {"doc_stride": 16},
    "sequence_classification": {"label_names": ["negative", "positive"], "text_pairs": True},
    "token_classification": {"label_names": ["O", "B-PER", "B-LOC"]},
    "image_classification": {"label_names": ["square", "cross", "frame", "triangle"]},
}
#: Methods whose rows become one sequence each.
_UNPACKED = (
    *("prompt", "image_classification", "image_text"),
    *("classification", "relevance", "question_answering", "choice"),
)
#: Methods of `_UNPACKED` whose rows have no sequence of tokens, or a prompt.
_WITHOUT_LENGTH = ("prompt", "image_classification")
_LAYERS = (
    "hidden_size: 64, intermediate_size: 128,\n"
    "           num_hidden_layers: 2, num_attention_heads: 4"
)
_SMALL = f"{_LAYERS}, max_position_embeddings: 128"
#: A small model for the task of a method; other tasks use a decoder.
_MODELS = {
    TaskType.MASKED_LM: f"model_type: bert, {_SMALL}",
    TaskType.TOKEN_CLASSIFICATION: f"model_type: bert, {_SMALL}",
    TaskType.QUESTION_ANSWERING: f"model_type: bert, {_SMALL}",
    TaskType.MULTIPLE_CHOICE: f"model_type: bert, {_SMALL}",
    TaskType.IMAGE_CLASSIFICATION: f"model_type: vit, image_size: 16, patch_size: 4, {_LAYERS}",
    TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION: "model_type: clip, projection_dim: 64,\n"
    f"           vision_config: {{image_size: 16, patch_size: 4, {_LAYERS}}},\n"
    f"           text_config: {{max_position_embeddings: 64, {_LAYERS}}}",
    TaskType.SEQUENCE_TO_SEQUENCE: "model_type: t5, d_model: 64, d_kv: 16, d_ff: 128,\n"
    "           num_layers: 2, num_heads: 4",
}
#: Actions with a template; the other actions need no file of their own.
ACTION_TEMPLATES = ("eval", "generate", "serve")
#: Word for a template of a method with other sections: its first comment, and these sections.
_VARIANTS = {
    "pretrain": ("Train a new model on texts.", ""),
    "lora": (
        "LoRA: train small adapters of an existing model.",
        "lora:\n  rank: 16\n  alpha: 32\n  dropout: 0.0\n",
    ),
    "qlora": (
        "QLoRA: train small adapters of an existing model, whose weights have 4 bits.",
        "lora:\n  rank: 16\n  alpha: 32\n  dropout: 0.0\n\n"
        "quantization:\n  model: {quantization_method: nf4}\n",
    ),
}
#: Method of the variants.
_VARIED = "sft"
_BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
#: Other word -> template.
_WORDS = {
    **dict.fromkeys(("finetune", "fine_tune", "chat", "adapter", "peft"), "lora"),
    **dict.fromkeys(("pretraining", "pretrain_lm", "new"), "pretrain"),
    **dict.fromkeys(("preference", "preferences", "rlaif"), "dpo"),
    **dict.fromkeys(("rl", "reasoning", "reinforcement"), "grpo"),
    **dict.fromkeys(("server", "api"), "serve"),
    **dict.fromkeys(("full", "instruct", "instruction"), "sft"),
    **dict.fromkeys(("distill", "teacher"), "distillation"),
    **dict.fromkeys(("classifier", "classification", "classify"), "sequence_classification"),
    **dict.fromkeys(("embed", "embeddings", "retrieval"), "embedding"),
    **dict.fromkeys(("rerank", "reranker", "ranking"), "cross_encoder"),
    **dict.fromkeys(("evaluate", "evaluation", "benchmark"), "eval"),
    "ner": "token_classification",
    "qa": "question_answering",
    "rlhf": "ppo",
    "reward_model": "reward",
}
SCHEMA_FILE = "elarge.schema.json"

_HEAD = """# yaml-language-server: $schema={schema}
#
# {doc}
#
#   elarge {file} --dry-run    check the file
#   elarge {file}              execute its actions
"""


def list_templates() -> list[str]:
    """Return the names of the templates: variants of methods, methods, then actions."""
    return [*_VARIANTS, *METHODS, *ACTION_TEMPLATES]


def find_template(word: str) -> str:
    """Return the name of the template for a word, such as `rl` for `grpo`.

    Raises:
        ConfigError: There is no such template.
    """
    name = word.lower().replace("-", "_")
    name = _WORDS.get(name, name)
    if name not in list_templates():
        hint = did_you_mean(name, [*list_templates(), *_WORDS])
        raise ConfigError(
            f"there is no template {word!r}{hint} (templates: {', '.join(list_templates())})"
        )
    return name


def has_data(name: str) -> bool:
    """Return whether a template runs on the example data; others name a data set or a model."""
    if name in _VARIANTS:
        return name == "pretrain"
    return name not in METHODS or bool(find_rows(METHODS[name].rows)[0])


def find_rows(kind: str) -> tuple[str, str]:
    """Return the list of `ed_elarge.example_data` for a kind of rows, and the fields of a row.

    A kind without a list has its example row; a kind of another package has no rows here.
    """
    if kind in _ROWS or kind not in ROW_KINDS or ROW_KINDS[kind].kind.has_media:
        return _ROWS.get(kind, ("", kind))
    return kind, ", ".join(ROW_KINDS[kind].kind.example)


def template(name: str, file: str) -> str:
    """Return the text of a run file.

    Args:
        name: A method or an action of `list_templates`.
        file: The name of the file, for its comments.
    """
    if name in METHODS:
        return _render_method(name, file)
    if name in _VARIANTS:
        doc, sections = _VARIANTS[name]
        return _render_method(_VARIED, file, doc=doc, sections=sections, save=name)
    return _render_action(str(canonical_action(name)), file)


def _render_method(
    name: str, file: str, *, doc: str = "", sections: str = "", save: str = ""
) -> str:
    """Return the template of a method.

    Args:
        name: The method.
        file: The name of the file.
        doc: The first comment; empty: the description of the method.
        sections: Further sections of an existing model; empty: the model is new.
        save: Name of the directory of the run; empty: that of the method.
    """
    entry = METHODS[name]
    doc = doc or " ".join((entry.arguments.__doc__ or name).split())
    rows, fields = _ROWS_OF_METHODS.get(name) or find_rows(entry.rows)
    source = f'{{type: python, data_files: "ed_elarge.example_data:{rows}"}}'
    if not rows:  # a method of another package
        source = "{type: ORGANIZATION/DATASET}"
    packed = rows and entry.rows not in _UNPACKED
    has_length = entry.rows in _UNPACKED and entry.rows not in _WITHOUT_LENGTH
    model = _EXISTING.format(base=_BASE) if sections else _model(name)
    parts = [_HEAD.format(schema=SCHEMA_FILE, doc=doc, file=file), model]
    parts += [sections] if sections else []
    for role in entry.roles:
        if role.required:
            parts.append(f"{role.section}:\n  name_or_path: models/{role.name}\n")
    parts.append(
        "mixture:\n"
        "  informs:\n"
        "    # Your rows: {data_files: my_rows.jsonl}. The fields of a row:\n"
        f"    # {fields}\n"
        f"    - {source}\n"
        "  eval_fraction: 0.1 # held out for evaluation\n"
        + ("  pack_tokens: true\n  pack_seq_length: 64\n" if packed else "")
        + ("  tokenization: {max_length: 64}\n" if has_length else "")
    )
    parts.append(_trainer(name, entry.arguments, save or name))
    parts.append("actions:\n  - validate\n  - train\n")
    return "\n".join(parts)


_EXISTING = """\
model:
  # A directory, a hub id, a GGUF file, or package:NAME/FILE of an installed package
  name_or_path: {base}

loader:
  dtype: fp32 # bf16 on a GPU or a TPU
"""


def _model(name: str) -> str:
    entry = METHODS[name]
    if not has_data(name):
        return "model:\n  name_or_path: ORGANIZATION/MODEL\n"
    if any(role.required for role in entry.roles):
        return (
            "model: # the student; teacher and student have the same tokenizer\n"
            "  name_or_path: models/student\n"
        )
    encoder = TaskType.MASKED_LM if name in _ENCODED else entry.task
    config = _MODELS.get(encoder, f"model_type: llama, {_SMALL}")
    return (
        "model:\n"
        "  # An existing model: replace config and tokenizer by name_or_path: ORGANIZATION/MODEL\n"
        f"  config: {{{config}}}\n"
        + ("" if entry.task in WITHOUT_TEXT else "  tokenizer: {train: {vocab_size: 400}}\n")
    )


def _trainer(name: str, arguments: type[TrainingArguments], save: str) -> str:
    values: dict[str, Any] = {
        "trainer_type": name,
        **_NEEDED.get(name, {}),
        "learning_rate": 1e-3,
        "max_training_steps": 20,
        "total_batch_size": 8,
        "log_steps": 5,
        "save_directory": f"runs/{save}",
    }
    if issubclass(arguments, RewardedArguments):
        values["reward_functions"] = [{"regex": {"pattern": "[0-9]"}}]
    if "max_prompt_length" in arguments.model_fields:
        values |= {"max_prompt_length": 16, "max_completion_length": 8}
    text = yaml.safe_dump({"trainer": values}, sort_keys=False)
    lines = [text.rstrip()]
    docs = read_meanings(arguments)
    for key, field in arguments.model_fields.items():
        if key in values or key in TrainingArguments.model_fields:
            continue
        lines += [f"  # {line}" for line in textwrap.wrap(docs.get(key, ""), 90)]
        lines.append(f"  # {key}: {describe_default(field).strip('`')}")
    return "\n".join(lines) + "\n"


def _render_action(name: str, file: str) -> str:
    kind = ACTIONS[name]
    doc = f"{kind.doc[0].upper()}{kind.doc[1:]}."
    options = {"eval": {"tasks": ["arc_easy"], "limit": 100}, "generate": {"prompts": ["The"]}}
    first = options.get(name, {"port": 11556})
    settings = ", ".join(f"{key}: {json.dumps(value)}" for key, value in first.items())
    return "\n".join(
        [
            _HEAD.format(schema=SCHEMA_FILE, doc=doc, file=file),
            "model:\n  name_or_path: models/mine # a directory, or a hub id\n",
            "esurge:\n  max_model_len: 128 # tokens of prompt and completion\n  max_num_seqs: 16\n",
            f"actions:\n  - validate\n  - {name}: {{{settings}}}\n",
        ]
    )
