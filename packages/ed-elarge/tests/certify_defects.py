"""Defects of model directories, each reproduced from a public issue.

An entry names the issue (repository and number on GitHub), the check of `elarge certify` that finds
the defect, and the function that plants the defect in a directory. Directories are a model, the
output folder of a run with an adapter, or a model with the GGUF file `model.gguf`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from certify_changes import (
    CHATML,
    HEADER,
    MARKED,
    TOOLS,
    TWICE,
    Change,
    adapter,
    adapter_settings,
    cut_short,
    cutting,
    double_prefix,
    edit,
    empty,
    exchanged,
    generation,
    gguf_of,
    gguf_without,
    half_precision,
    head_to_save,
    indexed,
    larger_embedding,
    lower_case,
    more_tokens,
    named_adapter,
    no_effect,
    not_numbers,
    nothing,
    one_space,
    only_norms,
    other_division,
    other_pickle,
    plain_end,
    prefixed,
    rows_of_zeros,
    setting,
    settings,
    template,
    tensors,
    tied_with_other_head,
    tokenizer,
    two_more_rows,
    two_templates,
    unmerged,
    with_zeros,
    without,
    without_head,
    without_spaces_before_marks,
    yarn,
)


class Defect(NamedTuple):
    """A defect, the check that finds the defect, and the public issue."""

    check: str
    issue: str
    plant: Change


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
