"""Changes that plant defects in the directory of a model; `certify_defects` lists the defects."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Change = Callable[[Path], None]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADER = "<|im_start|>assistant\n{% endif %}"
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWICE = TOOLS.replace(
    "call['function'] | tojson",
    "call['function']['name'] }}{{ call['function']['arguments'] | tojson | tojson",
)
#: The answer is marked for the loss.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADAPTER = "adapter_model.safetensors"


def edit(path: Path, *removed: str, **changes: Any) -> None:
    """Change keys of a JSON file, which need not exist."""
    values = json.loads(path.read_text()) if path.is_file() else {}
    for name in removed:
        values.pop(name, None)
    path.write_text(json.dumps(values | changes))


def edit_tensors(
    folder: Path, change: Callable[[dict[str, np.ndarray]], None], name: str = "model.safetensors"
) -> None:
    tensors = {key: np.array(x) for key, x in load_file(folder / name).items()}
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def template(text: str) -> Change:
    return lambda folder: (folder / "chat_template.jinja").write_text(text) and None


def generation(**changes: Any) -> Change:
    return lambda folder: edit(folder / "generation_config.json", **changes)


def settings(*removed: str, **changes: Any) -> Change:
    return lambda folder: edit(folder / "config.json", *removed, **changes)


def tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Change:
    return lambda folder: edit_tensors(folder, change)


def adapter(change: Callable[[dict[str, np.ndarray]], None]) -> Change:
    return lambda folder: edit_tensors(folder / "adapter", change, ADAPTER)


def adapter_settings(*removed: str, **changes: Any) -> Change:
    return lambda folder: edit(folder / "adapter" / "adapter_config.json", *removed, **changes)


def tokenizer(change: Callable[[dict[str, Any]], None]) -> Change:
    def plant(folder: Path) -> None:
        values = json.loads((folder / "tokenizer.json").read_text())
        change(values)
        (folder / "tokenizer.json").write_text(json.dumps(values))

    return plant


def without(*patterns: str) -> Change:
    def plant(folder: Path) -> None:
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return plant


def last_matrix(values: dict[str, np.ndarray]) -> str:
    return max(name for name in values if name.endswith("down_proj.weight"))


def setting(value: float) -> Callable[[dict[str, np.ndarray]], None]:
    def change(values: dict[str, np.ndarray]) -> None:
        values[last_matrix(values)][0, 0] = value

    return change


def with_zeros(values: dict[str, np.ndarray]) -> None:
    values[last_matrix(values)][:] = 0


def half_precision(values: dict[str, np.ndarray]) -> None:
    for name in values:
        values[name] = values[name].astype(np.float16)


def tied_with_other_head(folder: Path) -> None:
    def change(values: dict[str, np.ndarray]) -> None:
        values["lm_head.weight"] = values["model.embed_tokens.weight"] + 1

    edit(folder / "config.json", tie_word_embeddings=True)
    edit_tensors(folder, change)


def prefixed(prefix: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(values: dict[str, np.ndarray]) -> None:
        for name in [*values]:
            values[prefix + name] = values.pop(name)

    return change


def empty(values: dict[str, np.ndarray]) -> None:
    for name in values:
        values[name] = np.zeros(0, np.float32)


def only_norms(values: dict[str, np.ndarray]) -> None:
    for name in [name for name in values if "norm" not in name]:
        del values[name]


def two_more_rows(values: dict[str, np.ndarray]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        values[name] = np.concatenate([values[name], values[name][:2]])


def unmerged(values: dict[str, np.ndarray]) -> None:
    name = "model.layers.0.self_attn.q_proj"
    values[f"{name}.base_layer.weight"] = values.pop(f"{name}.weight")
    values[f"{name}.lora_A.weight"] = np.ones((4, 64), np.float32)


def without_head(values: dict[str, np.ndarray]) -> None:
    del values["lm_head.weight"]


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def indexed(
    *, without_first: bool = False, file: str = "model.safetensors", more: str = ""
) -> Change:
    def plant(folder: Path) -> None:
        names = [*load_file(folder / "model.safetensors")][int(without_first) :]
        weight_map = dict.fromkeys([*names, *([more] if more else [])], file)
        edit(folder / "model.safetensors.index.json", metadata={}, weight_map=weight_map)

    return plant


def other_pickle(folder: Path) -> None:
    import torch

    values = {n: torch.tensor(x) * 2 for n, x in load_file(folder / "model.safetensors").items()}
    torch.save(values, folder / "pytorch_model.bin")


def yarn(most: int) -> Change:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    return settings(max_position_embeddings=most, rope_parameters=scaling | {"rope_theta": 1e4})


def two_templates(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=CHATML.replace("user", "User") + " ")


def more_tokens(folder: Path) -> None:
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(folder)
    known.add_tokens([f"<extra_{i}>" for i in range(8)])
    known.save_pretrained(folder)


def exchanged(values: dict[str, Any]) -> None:
    vocab = values["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def one_space(values: dict[str, Any]) -> None:
    values["normalizer"] = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}


def without_spaces_before_marks(values: dict[str, Any]) -> None:
    replace = {"type": "Replace", "pattern": {"String": " !"}, "content": "!"}
    values["decoder"] = {"type": "Sequence", "decoders": [values["decoder"], replace]}


def other_division(values: dict[str, Any]) -> None:
    regex = {"type": "Split", "pattern": {"Regex": r"\p{N}|\p{L}+"}, "behavior": "Isolated"}
    regex["invert"] = False
    level = values["pre_tokenizer"] | {"use_regex": False}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [regex, level]}


def plain_end(values: dict[str, Any]) -> None:
    for token in values["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<|im_end|>"


def cutting(values: dict[str, Any]) -> None:
    values["truncation"] = {
        "direction": "Right", "max_length": 2048, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip


def lower_case(values: dict[str, Any]) -> None:
    values["normalizer"] = {"type": "Lowercase"}


def rows_of_zeros(values: dict[str, np.ndarray]) -> None:
    values["model.embed_tokens.weight"][3:5] = 0  # <|im_start|>, <|im_end|>


def write_gguf(folder: Path, change: Change = lambda folder: None) -> None:
    """Write model.gguf from a changed copy of a model."""
    from ed_models.checkpoints import hub

    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "model"
        shutil.copytree(folder, copy)
        change(copy)
        model: Any = hub.from_pretrained(copy, sharding_axis_dims=(1, 1, 1, 1, 1))
        model.save_gguf(folder / "model.gguf", tokenizer=str(copy), dtype="f32")


def gguf_of(change: Change) -> Change:
    return lambda folder: write_gguf(folder, change)


def gguf_without(*keys: str) -> Change:
    def plant(folder: Path) -> None:
        from gguf import GGUFReader, GGUFWriter
        from gguf.scripts.gguf_new_metadata import copy_with_new_metadata

        write_gguf(folder)
        path, other = folder / "model.gguf", folder / "other"
        reader = GGUFReader(path, "r")
        writer = GGUFWriter(other, "llama")
        copy_with_new_metadata(reader, writer, {}, [*keys])
        shutil.move(other, path)

    return plant


def double_prefix(values: dict[str, np.ndarray]) -> None:
    for name in [*values]:
        values[name.replace("base_model.model.model.", "base_model.model.")] = values.pop(name)


def named_adapter(values: dict[str, np.ndarray]) -> None:
    for name in [*values]:
        values[name.replace("lora_A.", "lora_A.other.")] = values.pop(name)


def with_empty_head(values: dict[str, np.ndarray]) -> None:
    values["base_model.model.lm_head.weight"] = np.zeros(0, np.float32)


def no_effect(values: dict[str, np.ndarray]) -> None:
    for name in values:
        if "lora_B" in name:
            values[name] = values[name] * 0


def nothing(values: dict[str, np.ndarray]) -> None:
    values.clear()


def not_numbers(values: dict[str, np.ndarray]) -> None:
    for name in values:
        values[name] = values[name] * np.float32(np.nan)


def larger_embedding(folder: Path) -> None:
    change = adapter_settings(modules_to_save=["embed_tokens"])
    change(folder)

    def add(values: dict[str, np.ndarray]) -> None:
        values["base_model.model.model.embed_tokens.weight"] = np.ones((424, 64), np.float32)

    edit_tensors(folder / "adapter", add, ADAPTER)


def head_to_save(folder: Path) -> None:
    adapter_settings(modules_to_save=["lm_head"])(folder)
    edit_tensors(folder / "adapter", with_empty_head, ADAPTER)
