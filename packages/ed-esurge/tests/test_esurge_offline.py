"""`LLM`: the names of vLLM's offline interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_esurge import LLM, LoRARequest, SamplingParams, StructuredOutputsParams, eSurge
from ed_esurge.offline import list_words
from ed_esurge.testing import byte_tokenizer
from ed_infra.errors import ConfigError
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("offline") / "model"
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    fields = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=2)
    del fields["model_type"]
    config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_options_of_vllm_are_flags_of_this_server() -> None:
    words, notes = list_words(
        {
            "max_model_len": 4096,
            "gpu_memory_utilization": 0.9,
            "dtype": "torch.bfloat16",
            "quantization": None,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "enforce_eager": True,
            "enable_lora": True,
            "swap_space": 4,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        }
    )
    assert sorted(words) == [
        "--dtype=bfloat16",
        "--gpu-memory-utilization=0.9",
        "--max-loras=1",
        "--max-model-len=4096",
        "--no-enable-prefix-caching",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 3}',
    ]
    assert [note.split()[0] for note in notes] == ["--enforce-eager", "--swap-space"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_length": 5}, "max-model-len"),
        ({"max_model_len": -1}, "max-model-len"),
        ({"dtype": "int3"}, "dtype"),
        ({"load_format": "dummy"}, "the files of the checkpoint decide"),
        ({"generation_config": "folder"}, "none of auto and vllm"),
    ],
)
def test_option_without_a_counterpart_is_an_error(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("a model that is not read", **options)


def test_grammars_of_vllm_are_structured_outputs() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert json.loads(StructuredOutputsParams(json=schema).json_schema or "") == schema
    assert StructuredOutputsParams(choice=["yes", "no"]).choice == ("yes", "no")
    assert StructuredOutputsParams(json_object=True).json_schema is not None
    params = SamplingParams(
        guided_decoding=StructuredOutputsParams(regex="a+"),  # pyright: ignore
        spaces_between_special_tokens=True,  # pyright: ignore
        best_of=None,  # pyright: ignore
    )
    assert params.structured_outputs is not None and params.structured_outputs.regex == "a+"
    for fields, words in (
        ({"json": schema, "regex": "a"}, "exactly one"),
        ({"structural_tag": "x"}, "structural_tag"),
        ({"jsn": schema}, "jsn"),
    ):
        with pytest.raises(ConfigError, match=words):
            StructuredOutputsParams(**fields)
    with pytest.raises(ValueError, match="n"):
        SamplingParams(best_of=3)  # pyright: ignore


def test_prompts_of_an_unknown_form_are_an_error() -> None:
    llm = object.__new__(LLM)
    for prompt, words in (
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data needs the server"),
        ({"text": "a"}, "text needs the server"),
        ({}, "a prompt is a text"),
    ):
        with pytest.raises(ConfigError, match=words):
            llm.generate(prompt)
    with pytest.raises(ConfigError, match="pass prompts"):
        llm.generate()


@pytest.mark.nightly
def test_outputs_of_a_script_equal_those_of_the_engine(folder: Path, tmp_path: Path) -> None:
    llm = LLM(folder, max_model_len=128, dtype="float32", max_num_seqs=4, seed=0, enable_lora=True)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    outputs = llm.generate(["hello", {"prompt": "a text"}], params)
    assert [out.prompt for out in outputs] == ["hello", "a text"]
    again = llm.generate([{"prompt_token_ids": outputs[0].prompt_token_ids}], params)[0]
    old = llm.generate(prompt_token_ids=[outputs[0].prompt_token_ids], sampling_params=params)[0]
    for one in (again, old):
        assert one.outputs[0].token_ids == outputs[0].outputs[0].token_ids
        assert one.outputs[0].text == outputs[0].outputs[0].text
    first = outputs[0].outputs[0]
    assert first.finish_reason == "length" and len(first.token_ids) == 5
    assert first.logprobs is not None and first.token_ids[0] in first.logprobs[0]

    chat = [{"role": "user", "content": "hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    (one,) = llm.chat(chat, params)
    both = llm.chat([chat, parts], params, chat_template_kwargs={})
    assert [out.outputs[0].text for out in both] == [one.outputs[0].text] * 2
    tokenizer: Any = llm.get_tokenizer()
    assert tokenizer.decode(one.prompt_token_ids).endswith("<user>hi<assistant>")
    choice = SamplingParams(
        max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    assert llm.generate("is it?", choice)[0].outputs[0].text in ("yes", "no")

    engine = llm.llm_engine
    assert isinstance(engine, eSurge)
    vectors = llm.embed(["a", "b"])
    expected = engine.embed(["a", "b"])
    for vector, output in zip(vectors, expected, strict=True):
        np.testing.assert_allclose(vector.outputs.embedding, output.pooled, atol=1e-6)
    scores = [one.outputs.score for one in llm.score("a", ["a", "b"])]
    assert scores[0] == pytest.approx(1.0, abs=1e-5) and scores[1] < scores[0]
    with pytest.raises(ConfigError, match="needs a classifier"):
        llm.classify("a")
    model = LlamaForCausalLM.from_pretrained(folder)
    from ed_infra.specs import LoraSpec

    model.apply_lora(LoraSpec(rank=4), seed=1).save_pretrained(tmp_path / "adapter")
    request = LoRARequest("style", 1, str(tmp_path / "adapter"))
    adapted = llm.generate("hello", params, lora_request=request)[0]
    assert adapted.outputs[0].token_ids == first.token_ids  # a new adapter changes nothing
    assert [one.name for one in engine.list_lora_adapters()] == ["style"]
    other = LoRARequest("other", 2, str(tmp_path / "adapter"))
    llm.generate("hello", params, lora_request=other)
    assert [one.name for one in engine.list_lora_adapters()] == ["other"]
