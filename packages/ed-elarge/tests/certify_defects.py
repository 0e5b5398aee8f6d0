"""Defects of model directories, each reproduced from a public issue.

An entry names the issue (repository and number on GitHub), the check of `elarge certify` that finds
the defect, and the function that plants the defect in a directory. Directories are a model, the
output folder of a run with an adapter, or a model with the GGUF file `model.gguf`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


class Defect(NamedTuple):
    """A defect, the check that finds the defect, and the public issue."""

    check: str
    issue: str
    plant: Change


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


_TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
_LAST = "{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}"

MODEL_DEFECTS: dict[str, Defect] = {
    # Chat templates
    "two templates": Defect("chat_template_files", "QwenLM/Qwen3-VL#1488", two_templates),
    "template of another model": Defect(
        "chat_template_of_base", "hiyouga/LlamaFactory#7785", template(CHATML.replace("im_", "x_"))
    ),
    "template with a changed space": Defect(
        "chat_template_of_base", "InternLM/xtuner#658", template(CHATML + " ")
    ),
    "template of the tokenizer, not of the training": Defect(
        "chat_template_of_base",
        "marin-community/marin#7406",
        template(CHATML.replace(HEADER, "<|im_start|>assistant\n<think>{% endif %}")),
    ),
    "template without system messages": Defect(
        "messages",
        "SUSTech-IDEA/SUS-Chat#3",
        template(CHATML.replace(_TURN, "{% if m['role'] != 'system' %}" + _TURN + "{% endif %}")),
    ),
    "prompt whose last token differs": Defect(
        "prompt_of_training",
        "allenai/open-instruct#1869",
        template(CHATML.replace(HEADER, "<|im_start|>assistant:{% endif %}")),
    ),
    "prompt with a thought that training lacks": Defect(
        "prompt_of_training",
        "huggingface/trl#6361",
        template(CHATML.replace(HEADER, "<|im_start|>assistant\n<think>\n{% endif %}")),
    ),
    "prompt without the role of the answer": Defect(
        "generation_prompt",
        "instructlab/training#232",
        template(CHATML.replace("{% if add_generation_prompt %}" + HEADER, "")),
    ),
    "beginning of an answer after every conversation": Defect(
        "generation_prompt",
        "huggingface/transformers#30893",
        template(CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")),
    ),
    "template with the number of messages": Defect(
        "turns",
        "QwenLM/Qwen3.8#131",
        template("{{ messages | length }} messages follow" + CHATML),
    ),
    "template that drops earlier answers": Defect(
        "turns",
        "PrimeIntellect-ai/prime-rl#1334",
        template(CHATML.replace("{{ m['content'] }}", _LAST)),
    ),
    "tools that are not rendered": Defect(
        "tools",
        "ggml-org/llama.cpp#27129",
        template(TOOLS.replace("tools | tojson", "'Use your tools.'")),
    ),
    "arguments that are encoded twice": Defect(
        "tools", "ggml-org/llama.cpp#19553", template(TWICE)
    ),
    "calls that are not rendered": Defect(
        "tools",
        "huggingface/trl#5517",
        template(TOOLS.replace("{{ call['function'] | tojson }}", "")),
    ),
    "enable_thinking without effect": Defect(
        "thinking",
        "PrimeIntellect-ai/verifiers#538",
        template(CHATML + "{% if enable_thinking is defined %}{% endif %}"),
    ),
    # Loss and ends
    "loss on questions": Defect(
        "loss_on_answers",
        "NVIDIA-NeMo/Megatron-Bridge#3927",
        template("{% generation %}" + CHATML + "{% endgeneration %}"),
    ),
    "no loss at all": Defect(
        "end_learned",
        "marin-community/marin#7237",
        template(CHATML + "{% generation %}{% endgeneration %}"),
    ),
    "end of the answer without loss": Defect(
        "end_learned", "huggingface/trl#976", template(MARKED)
    ),
    "end of the answer as padding": Defect(
        "padding",
        "huggingface/transformers#23530",
        lambda folder: edit(folder / "tokenizer_config.json", pad_token="<|im_end|>"),
    ),
    "end that replies contain": Defect(
        "end_hidden", "deepspeedai/DeepSpeedExamples#496", tokenizer(plain_end)
    ),
    "end that users can write": Defect(
        "special_tokens_of_users", "huggingface/transformers#29279", tokenizer(plain_end)
    ),
    "end of turn missing in eos_token_id": Defect(
        "end_stops", "vllm-project/vllm#4180", generation(eos_token_id=1)
    ),
    "end of turn of another template": Defect(
        "end_stops", "unslothai/unsloth#384", template(CHATML.replace("<|im_end|>", "<|pad|>"))
    ),
    "no eos_token_id": Defect(
        "end_stops",
        "simple-stories/simple_stories_train#23",
        lambda folder: (
            [
                edit(folder / name, eos_token_id=None)
                for name in ("config.json", "generation_config.json")
            ]
            and None
        ),
    ),
    "two beginnings": Defect(
        "one_beginning",
        "abetlen/llama-cpp-python#1501",
        template("{{ bos_token }}{{ bos_token }}" + CHATML),
    ),
    "eos_token_id outside the tokenizer": Defect(
        "special_ids", "OpenCoder-llm/OpenCoder-llm#21", generation(eos_token_id=128009)
    ),
    "pad_token_id of another model": Defect(
        "special_ids", "salesforce/CodeGen#50", generation(pad_token_id=128004)
    ),
    "bos_token_id of another token": Defect(
        "special_ids", "huggingface/transformers#17431", settings(bos_token_id=7)
    ),
    "eos_token_id of another token": Defect(
        "special_ids", "allenai/OLMo#757", settings(eos_token_id=9)
    ),
    # Tokenizers
    "added tokens without embeddings": Defect("embeddings", "InternLM/InternLM#715", more_tokens),
    "tokens of the template that were never trained": Defect(
        "template_tokens", "meta-pytorch/torchtune#2429", tensors(rows_of_zeros)
    ),
    "tokenizer that merges spaces": Defect(
        "round_trip", "openlm-research/open_llama#40", tokenizer(one_space)
    ),
    "tokenizer that removes spaces before marks": Defect(
        "round_trip", "huggingface/transformers#44914", tokenizer(without_spaces_before_marks)
    ),
    "tokenizer that divides texts in another way": Defect(
        "tokens_of_base", "unslothai/unsloth#4996", tokenizer(other_division)
    ),
    "tokens with exchanged ids": Defect(
        "tokens_of_base", "haotian-liu/LLaVA#193", tokenizer(exchanged)
    ),
    "tokenizer that cuts prompts": Defect(
        "whole_prompts", "ai-dynamo/dynamo#11792", tokenizer(cutting)
    ),
    # Weights
    "NaN": Defect("finite", "haotian-liu/LLaVA#1278", tensors(setting(np.nan))),
    "overflow of float16": Defect(
        "finite", "ultralytics/ultralytics#24731", tensors(setting(np.inf))
    ),
    "another dtype than stated": Defect(
        "dtype", "meta-llama/llama-cookbook#289", tensors(half_precision)
    ),
    "dtype of the configuration": Defect(
        "dtype", "huggingface/transformers#29955", settings(dtype="bfloat16")
    ),
    "tied head with other values": Defect(
        "tied_head", "huggingface/transformers#45127", tied_with_other_head
    ),
    "names of a compiled model": Defect(
        "tensors", "karpathy/nanoGPT#325", tensors(prefixed("_orig_mod.model."))
    ),
    "names of a parallel model": Defect(
        "tensors",
        "FareedKhan-dev/train-llm-from-scratch#36",
        tensors(prefixed("module._orig_mod.")),
    ),
    "empty tensors of ZeRO-3": Defect("tensors", "deepspeedai/DeepSpeed#2413", tensors(empty)),
    "almost no tensors": Defect("tensors", "huggingface/peft#2054", tensors(only_norms)),
    "resized embeddings, old vocab_size": Defect(
        "tensors", "unslothai/unsloth#943", tensors(two_more_rows)
    ),
    "adapter that is not merged": Defect("tensors", "vllm-project/vllm#1625", tensors(unmerged)),
    "no head": Defect("tensors", "QwenLM/Qwen3-VL-Embedding#89", tensors(without_head)),
    "file that was cut short": Defect("tensors", "lyogavin/airllm#137", cut_short),
    "index without a tensor": Defect("index", "Blaizzy/mlx-vlm#1827", indexed(without_first=True)),
    "index of other files": Defect(
        "index", "Neph0s/CoSER#3", indexed(file="model-00001-of-00030.safetensors")
    ),
    "index with a missing tensor": Defect(
        "index", "sgl-project/sglang#32279", indexed(more="model.layers.9.mlp.up_proj.weight")
    ),
    "quantization_config of plain weights": Defect(
        "codes",
        "unslothai/unsloth#105",
        settings(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ),
    "old weights in another format": Defect(
        "one_model", "huggingface/diffusers#14769", other_pickle
    ),
    # Settings
    "more positions than YaRN has": Defect("positions", "NVIDIA/Megatron-LM#1418", yarn(1024)),
    "tokenizer with more positions": Defect(
        "positions",
        "huggingface/transformers#8563",
        lambda folder: edit(folder / "tokenizer_config.json", model_max_length=100_000),
    ),
    "temperature without sampling": Defect(
        "generation_settings",
        "huggingface/transformers#29988",
        generation(do_sample=False, temperature=0.6, top_p=0.9),
    ),
    "temperature of 0": Defect(
        "generation_settings",
        "meta-llama/llama#687",
        generation(do_sample=True, temperature=0.0),
    ),
    "replies of 20 tokens": Defect(
        "generation_settings", "thunlp/OpenPrompt#269", generation(max_length=20)
    ),
    "no cache after training": Defect(
        "cache", "turbo-llm/turbo-alignment#47", settings(use_cache=False)
    ),
    "window that was dropped": Defect(
        "settings_of_base",
        "NVIDIA-NeMo/Megatron-Bridge#4800",
        settings(model_type="mistral", architectures=["MistralForCausalLM"]),
    ),
    "another size of heads": Defect(
        "settings_of_base", "NVIDIA-NeMo/Skills#228", settings(head_dim=32)
    ),
    "epsilon of another model": Defect(
        "settings_of_base", "huggingface/transformers#38025", settings(rms_norm_eps=1e-3)
    ),
    "scaling of positions that the model lacks": Defect(
        "settings_of_base", "MakazhanAlpamys/Soup#793", yarn(256)
    ),
    "body without the head": Defect(
        "settings_of_base", "huggingface/peft#868", settings(architectures=["LlamaModel"])
    ),
    "no tokenizer": Defect(
        "files_of_base", "kaistAI/LangBridge#13", without("token*", "chat_template.jinja")
    ),
    "no chat template": Defect(
        "files_of_base", "hiyouga/LlamaFactory#5836", without("chat_template.jinja")
    ),
    "no generation_config.json": Defect(
        "files_of_base", "vllm-project/vllm#4182", without("generation_config.json")
    ),
    "no code of custom classes": Defect(
        "code",
        "huggingface/transformers#15224",
        settings(auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}),
    ),
    "training without effect": Defect("changed", "OpenBMB/MiniCPM-V#559", lambda folder: None),
}

ADAPTER_DEFECTS: dict[str, Defect] = {
    "adapter without effect": Defect("adapter_effect", "NetManAIOps/ChatTS#28", adapter(no_effect)),
    "adapter with scale 0": Defect(
        "adapter_effect", "invergent-ai/surogate#173", adapter_settings(lora_alpha=0)
    ),
    "names with another prefix": Defect(
        "adapter_tensors", "huggingface/peft#1579", adapter(double_prefix)
    ),
    "names with the name of the adapter": Defect(
        "adapter_tensors", "huggingface/peft#2699", adapter(named_adapter)
    ),
    "adapter without tensors": Defect("adapter_tensors", "huggingface/trl#4416", adapter(nothing)),
    "empty module of modules_to_save": Defect(
        "adapter_tensors", "huggingface/peft#2450", head_to_save
    ),
    "embedding of a larger vocabulary": Defect(
        "adapter_tensors", "huggingface/peft#1457", larger_embedding
    ),
    "adapter of changed base weights": Defect(
        "adapter_tensors", "huggingface/peft#1929", adapter_settings(init_lora_weights="pissa")
    ),
    "adapter of NaN": Defect("adapter_tensors", "getainode/ainode#213", adapter(not_numbers)),
}

#: Defects of which the numbers of the model are computed.
MERGE_DEFECTS: dict[str, Defect] = {
    "merge with another alpha": Defect(
        "merge", "ml-explore/mlx-examples#622", adapter_settings(lora_alpha=32)
    ),
    "merge without the scale of rsLoRA": Defect(
        "merge", "sgl-project/sglang#40835", adapter_settings(use_rslora=True)
    ),
}

GGUF_DEFECTS: dict[str, Defect] = {
    "no template in the GGUF file": Defect(
        "gguf_tokens", "ollama/ollama#6823", gguf_of(without("chat_template.jinja"))
    ),
    "another template in the GGUF file": Defect(
        "gguf_tokens", "unslothai/unsloth#3899", gguf_of(template(CHATML + " "))
    ),
    "another end in the GGUF file": Defect(
        "gguf_tokens",
        "ggml-org/llama.cpp#6745",
        gguf_of(lambda folder: edit(folder / "tokenizer_config.json", eos_token="<|pad|>")),
    ),
    "plain end tokens in the GGUF file": Defect(
        "gguf_tokens", "ggml-org/llama.cpp#5838", gguf_of(tokenizer(plain_end))
    ),
    "tokens missing in the GGUF file": Defect(
        "gguf_tokens", "ggml-org/llama.cpp#15842", gguf_of(tokenizer(exchanged))
    ),
    "unknown division of texts in the GGUF file": Defect(
        "gguf_tokens", "ggml-org/llama.cpp#7476", gguf_without("tokenizer.ggml.pre")
    ),
    "another base of positions in the GGUF file": Defect(
        "gguf_settings",
        "ggml-org/llama.cpp#3090",
        gguf_of(settings("rope_parameters", rope_theta=1e6)),
    ),
}

#: Further defects, without a public issue.
OTHER_DEFECTS: dict[str, tuple[str, Change]] = {
    "matrix of zeros": ("not_empty", tensors(with_zeros)),
    "template without messages": (
        "messages",
        template("{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>{% endfor %}"),
    ),
    "lower-case tokenizer": ("round_trip", tokenizer(lower_case)),
    "negative eos_token_id": ("special_ids", generation(eos_token_id=-5)),
    "beams that are not a number": ("generation_settings", generation(num_beams=0, top_k=-3)),
}
