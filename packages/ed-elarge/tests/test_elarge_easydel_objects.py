"""Transforms of rows and small objects of `import easydel as ed`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import easydel as ed
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_data import Inform, Mixture, build_loader
from ed_data.schema import PREFERENCE
from ed_data.sources.python import GivenRows
from ed_data.tokens.bpe import train_bpe
from ed_infra.errors import ConfigError
from ed_layers.losses import TokenLoss
from flax import nnx

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
QUESTION = {"role": "user", "content": "a question"}
PAIR = {
    "chosen": [QUESTION, {"role": "assistant", "content": "an answer"}],
    "rejected": [QUESTION, {"role": "assistant", "content": "no"}],
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = train_bpe(["a question? and an answer! user assistant: no"] * 9, vocab_size=280)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_pair_has_the_tokens_of_a_trainer(tokenizer: Any) -> None:
    row: Any = ed.DPOPreprocessTransform(tokenizer, 24, 24)(PAIR)
    given = GivenRows([PAIR])
    inform = Inform(type="python", data_files=given.address)
    mixture = Mixture(informs=[inform], batch_size=1)
    batch = build_loader(
        mixture, tokenizer, seq_length=48, shuffle=False, schema=PREFERENCE
    ).batch_at(0)
    for name in ("chosen", "rejected"):
        ids, mask = row[f"{name}_input_ids"], row[f"{name}_attention_mask"]
        assert [token for token, one in zip(ids, mask, strict=True) if one] == [
            token
            for token, one in zip(
                batch[f"{name}_input_ids"][0], batch[f"{name}_segment_ids"][0], strict=True
            )
            if one
        ]
        labels = [token for token in row[f"{name}_labels"] if token != -100]
        assert tokenizer.decode(labels).startswith("assistant")
        assert len(ids) == len(mask) == len(row[f"{name}_labels"]) == 48
    assert row["prompt_attention_mask"] == sorted(row["prompt_attention_mask"])
    assert ed.ORPOPreprocessTransform(tokenizer, 24, 24)(PAIR) == row
    good, bad = ed.BCOPreprocessTransform(tokenizer)(PAIR)
    assert good["label"] is True and bad["label"] is False
    assert good["completion_labels"] == row["chosen_labels"][: len(good["completion_labels"])]
    reward: Any = ed.RewardPreprocessTransform(tokenizer, 48)(PAIR)
    assert reward["input_ids_chosen"] == row["chosen_input_ids"]


def test_texts_chats_and_prompts_are_cut_and_padded(tokenizer: Any) -> None:
    transform = ed.SFTPreprocessTransform(tokenizer, 40, mask_prompt=True)
    chat: Any = transform({"messages": PAIR["chosen"]})
    learned = [t for t, one in zip(chat["input_ids"], chat["completion_mask"], strict=True) if one]
    assert "an answer" in tokenizer.decode(learned) and "question" not in tokenizer.decode(learned)
    parts: Any = transform({"prompt": "a question?", "completion": " an answer"})
    text: Any = ed.SFTPreprocessTransform(tokenizer, 40)({"text": "a question? an answer"})
    assert sum(parts["attention_mask"]) >= sum(text["attention_mask"])
    assert len(ed.SFTPreprocessTransform(tokenizer, 3)({"text": "a question?"})["input_ids"]) == 3
    prompt: Any = ed.GRPOPreprocessTransform(tokenizer, 4)({"prompt": "a question? and no"})
    assert len(prompt["input_ids"]) == 4 and prompt["attention_mask"] == [1] * 4
    assert tokenizer.decode(prompt["input_ids"]).endswith("no")
    with pytest.raises(ConfigError, match="add_eos=False"):
        ed.SFTPreprocessTransform(tokenizer, 8, add_eos=False)
    with pytest.raises(ConfigError, match="the text in 'text' has no prompt"):
        transform({"text": "a question?"})


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")
@pytest.mark.parametrize("is_reset", [False, True])
def test_sequences_are_packed_with_separators(is_reset: bool) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [[5, 6], [7], [8] * 9], "attention_mask": [[1] * 9] * 3})
    packed = ed.pack_sequences(rows, 6, pad_token_id=1, reset_position_ids=is_reset)
    assert packed["input_ids"][0] == [5, 6, 1, 7, 1, 1]
    assert packed["position_ids"][0] == ([0, 1, 2, 0, 1, 0] if is_reset else [0, 1, 2, 3, 4, 0])
    assert packed["input_ids"][1] == [8] * 6


def test_dropout_is_disabled_in_inference_mode() -> None:
    from ed_layers.dropout import apply_dropout

    x, key = jnp.ones(64), jax.random.key(0)
    assert not np.array_equal(apply_dropout(x, 0.5, key), x)
    with ed.set_inference_mode() as is_on:
        assert is_on and ed.is_inference_mode()
        assert np.array_equal(apply_dropout(x, 0.5, key), x)
    assert not ed.is_inference_mode()


def test_tokenizer_of_mistral_common_pads_on_the_left() -> None:
    inner = SimpleNamespace(
        pad_id=0,
        bos_id=1,
        eos_id=2,
        encode=lambda text, bos, eos: [1] * bos + [len(word) for word in text.split()] + [2] * eos,
    )
    outer = SimpleNamespace(
        instruct_tokenizer=SimpleNamespace(tokenizer=inner), decode=lambda ids: str(ids)
    )
    tokenizer = ed.Mistral3Tokenizer(outer)
    rows = tokenizer(["seven", "three letters"], padding=True, return_tensors="np")
    assert rows["input_ids"].tolist() == [[0, 1, 5, 2], [1, 5, 7, 2]]
    assert rows["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert tokenizer("one more word", truncation=True, max_length=2)["input_ids"] == [1, 3]
    assert tokenizer.decode([1, 5, 2]) == "[5]"


def test_loss_config_of_easydel_is_the_loss_here() -> None:
    loss = ed.LossConfig(
        label_smoothing=0.1, z_loss=1e-4, reduction="mean", chunk_vocab_size=8192, ignore_index=-100
    )
    assert loss == TokenLoss(label_smoothing=0.1, z_loss=1e-4)
    for name, value in (("ignore_index", 0), ("shift_tokens", False), ("reduction", "sum")):
        with pytest.raises(ConfigError, match=f"{name}={value!r} is not supported"):
            ed.LossConfig(**{name: value})
    with pytest.raises(ConfigError, match=r"no field 'loss_type' \(known: label_smoothing"):
        ed.LossConfig(loss_type="cross_entropy")


def test_scaled_model_has_the_fields_of_its_class(tmp_path: Path) -> None:
    from easydel.trainers.ray_scaler import RayDistributedTrainer

    sizes = {"hidden_size": 16, "intermediate_size": 32}
    trainer = RayDistributedTrainer(
        "model", model_task="causal-lm", model_type="llama", config_scaling_variables=sizes
    )
    config: Any = trainer.create_config(2)
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == (32, 64, 4)
    assert config.max_position_embeddings == 8192
    trainer.save_config(tmp_path / "trainer.json")
    again = RayDistributedTrainer.from_config(tmp_path / "trainer.json", model_class=ed.LlamaModel)
    assert (again.model_type, again.model_task) == ("llama", ed.TaskType.BASE_MODULE)
    assert again.create_config(1).hidden_size == 16
    wrong = RayDistributedTrainer(
        "model", model_class=ed.LlamaForCausalLM, config_variables={"hiden_size": 8}
    )
    with pytest.raises(ConfigError, match="did you mean 'hidden_size'"):
        wrong.create_config(1)
    with pytest.raises(ConfigError, match="scaling_index is 0"):
        trainer.create_config(0)
    with pytest.raises(ConfigError, match="pass model_class, or model_type and model_task"):
        RayDistributedTrainer("model", model_type="llama")


@pytest.mark.nightly
def test_scaled_model_is_trained(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    trainer = ed.RayDistributedTrainer(
        str(tmp_path / "model"),
        model_class=ed.LlamaForCausalLM,
        config_scaling_variables={"hidden_size": 16, "intermediate_size": 32},
        config_variables={
            "vocab_size": len(tokenizer), "num_hidden_layers": 1, "max_position_embeddings": 64,
            "sharding_axis_dims": (1, 1, 1, 1, 1), "dtype": "float32", "param_dtype": "float32",
        },
    )  # fmt: skip
    arguments = ed.TrainingArguments(
        max_training_steps=2, total_batch_size=2, save_directory=str(tmp_path / "run"),
        learning_rate=1e-2, max_length=16, log_steps=1,
    )  # fmt: skip
    rows = [{"text": "a question? and an answer!"}] * 4
    output = trainer.train(2, arguments, rows)
    assert int(output.state.step) == 2
    row = trainer.process_sample_data("a question", 8, "right")
    assert row["input_ids"].shape == row["attention_mask"].shape == (8,)
    chat = trainer.process_messages_data([QUESTION], 12)
    assert tokenizer.decode(chat["input_ids"][chat["attention_mask"] == 1]).startswith("user: a")
    assert trainer.extract_column_names(rows) == ["text"]


@pytest.mark.nightly
@pytest.mark.torch
def test_recordings_of_every_form_have_one_transcript(tmp_path: Path) -> None:
    import soundfile
    from ed_models.speech import load_transcriber

    from tests.speech_cases import RATE, recording, write_whisper

    write_whisper(tmp_path)
    samples = recording(2.5)
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    plain = load_transcriber(str(tmp_path))
    expected = plain.transcribe(samples, language="en", timestamps=True, max_new_tokens=5)
    inference = ed.vWhisperInference(
        model=plain.model,
        tokenizer=plain.processor.tokenizer,
        processor=plain.processor,
        inference_config=ed.vWhisperInferenceConfig(
            max_length=8, language="en", return_timestamps=True, is_multilingual=True
        ),
        dtype=jnp.float32,
    )
    content = (tmp_path / "a.wav").read_bytes()
    mapping = {"array": samples, "sampling_rate": RATE}
    for form in (str(tmp_path / "a.wav"), tmp_path / "a.wav", content, samples, mapping):
        spoken = inference(form)
        assert spoken["text"] == expected.text
        times = [chunk["timestamp"] for chunk in spoken["chunks"]]
        assert times == [(one.start, one.end) for one in expected.segments]
    assert "chunks" not in inference(samples, return_timestamps=False)
    with pytest.warns(UserWarning, match="not needed here: chunk_length_s, batch_size"):
        assert inference(samples, chunk_length_s=30, batch_size=2)["text"] == expected.text
    with pytest.raises(OSError, match="no-such-file"):
        inference(str(tmp_path / "no-such-file.wav"))
    for options, words in (({"is_multilingual": False}, "several"), ({"max_length": 3}, "begin")):
        config = ed.vWhisperInferenceConfig(language="en", **options)
        with pytest.raises(ConfigError, match=words):
            ed.vWhisperInference(plain.model, None, plain.processor, config)(samples)


@pytest.mark.nightly
def test_quantizer_placement_and_registry_act_on_a_model() -> None:
    config = ed.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = ed.LlamaForCausalLM(config, rngs=nnx.Rngs(0)).shard_model()
    spec = ed.EasyDeLQuantizationConfig(dtype="nf4", group_size=32)
    quantizer = ed.EasyQuantizer(spec)
    quantized = quantizer.apply_quantization(model)
    assert quantized.is_quantized
    logits = model.quantize(spec)(jnp.ones((1, 4), jnp.int32)).logits
    np.testing.assert_array_equal(quantized(jnp.ones((1, 4), jnp.int32)).logits, logits)
    assert not quantizer.dequantize_modules(quantized).is_quantized
    matrix = jax.random.normal(jax.random.key(0), (32, 8))
    assert quantizer(matrix, "model.norm") is matrix
    rounded = quantizer.quantize_array(matrix, simulate=True)
    # Half of the widest gap between two values of nf4 is 0.15 of the largest number, about 3.
    np.testing.assert_allclose(rounded, matrix, atol=0.5)
    shard, gather = ed.AutoShardAndGatherFunctions.from_config(config)
    paths = {path for path, _ in nnx.to_flat_state(model.params)}
    assert paths == shard.keys() == gather.keys()
    nested, _ = ed.AutoShardAndGatherFunctions.from_config(config, flatten=False)
    assert callable(nested["lm_head"]["kernel"])
    assert ed.Registry().get_config("llama") is ed.LlamaConfig
