"""BERT and T5 beyond the conformance suite: heads, pooling, token types, beams, and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_models import (
    AutoEasyDeLConfig,
    AutoEasyDeLModel,
    AutoEasyDeLModelForEmbedding,
    AutoEasyDeLModelForMaskedLM,
    AutoEasyDeLModelForSeq2SeqLM,
    AutoEasyDeLModelForSequenceClassification,
)
from ed_models.conformance import ONE, Subject, forward
from ed_models.families.bert import BertConfig
from ed_models.families.t5 import T5Config, T5ForConditionalGeneration
from ed_models.generation.prompts import longest_sequence
from flax import nnx

from tests.conformance.cases import cases, subjects

BertForSequenceClassification: Any = registry.get_module("sequence-classification", "bert")
BERT = cases("bert")["bert"].rows["encoder"]
T5 = cases("t5")["t5"].rows["v1.0, tied"]
IDS = np.random.default_rng(0).integers(3, 160, (3, 12)).astype(np.int32)
MASK = np.asarray([[1] * 12, [1] * 7 + [0] * 5, [1] * 9 + [0] * 3], np.int32)
TYPES = np.asarray([[0] * 4 + [1] * 8] * 3, np.int32)


def torch_classifier(folder: Path, **fields: Any) -> Any:
    """Save a classifier of transformers with random weights, and return the model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT, num_labels=4, **fields)
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.nightly
@pytest.mark.torch
def test_bert_classifier_equals_transformers_in_logits_pooled_output_and_gradients(
    tmp_path: Path,
) -> None:
    theirs = torch_classifier(tmp_path)
    import torch

    model = AutoEasyDeLModelForSequenceClassification.from_pretrained(
        tmp_path, sharding_axis_dims=ONE
    )
    assert isinstance(model, BertForSequenceClassification)
    assert "token_type_ids" in model.input_names
    arrays = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": TYPES}
    tensors = {name: torch.tensor(x, dtype=torch.long) for name, x in arrays.items()}
    labels = np.asarray([3, 0, 2])
    expected = theirs(**tensors, labels=torch.tensor(labels))
    pooled = theirs.bert(**tensors).pooler_output.detach().numpy()
    np.testing.assert_allclose(model(**arrays).logits, expected.logits.detach(), atol=1e-4)
    body = AutoEasyDeLModel.from_pretrained(tmp_path, sharding_axis_dims=ONE)
    np.testing.assert_allclose(body(**arrays).pooler_output, pooled, atol=1e-4)
    expected.loss.backward()
    graphdef, params, other = model.split_module()

    def loss(params: nnx.State) -> jax.Array:
        module = nnx.merge(graphdef, params, other)
        return module.compute_loss(**arrays, labels=jnp.asarray(labels))[0].loss

    value, grads = jax.value_and_grad(loss)(params)
    np.testing.assert_allclose(value, expected.loss.detach(), atol=1e-5)
    got = nnx.merge(graphdef, grads, other)
    reference = theirs.bert.embeddings.token_type_embeddings.weight.grad
    np.testing.assert_allclose(got.model.embed_types.embedding[...], reference, atol=1e-4)
    reference = theirs.classifier.weight.grad.T
    np.testing.assert_allclose(got.score.kernel[...], reference, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.torch
def test_bert_checkpoints_serve_every_task_and_load_in_transformers(tmp_path: Path) -> None:
    theirs = torch_classifier(tmp_path / "theirs")
    import torch
    import transformers

    options: dict[str, Any] = {"sharding_axis_dims": ONE}
    body = AutoEasyDeLModel.from_pretrained(tmp_path / "theirs", **options)
    embedder = AutoEasyDeLModelForEmbedding.from_pretrained(tmp_path / "theirs", **options)
    arrays = {"attention_mask": MASK, "token_type_ids": TYPES}
    hidden = body(IDS, **arrays).last_hidden_state
    tensors = {n: torch.tensor(x, dtype=torch.long) for n, x in arrays.items()}
    reference = theirs.bert(torch.tensor(IDS, dtype=torch.long), **tensors)
    real = MASK != 0
    reference_hidden = reference.last_hidden_state.detach().numpy()
    np.testing.assert_allclose(hidden[real], reference_hidden[real], atol=1e-4)
    mean = np.asarray([row[keep].mean(axis=0) for row, keep in zip(hidden, real, strict=True)])
    np.testing.assert_allclose(embedder(IDS, **arrays).embeddings, mean, atol=1e-5)
    for model, cls in ((body, "BertModel"), (embedder, "BertModel")):
        model.save_pretrained(tmp_path / "ours")
        again = getattr(transformers, cls).from_pretrained(tmp_path / "ours").eval()
        out = again(torch.tensor(IDS, dtype=torch.long), **tensors).pooler_output
        np.testing.assert_allclose(out.detach(), reference.pooler_output.detach(), atol=1e-4)


@pytest.mark.torch
def test_bert_classifier_starts_from_a_masked_language_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**BERT)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    model = AutoEasyDeLModelForSequenceClassification.from_pretrained(
        tmp_path, sharding_axis_dims=ONE
    )
    pooler, score = model.transform.dense.kernel[...], model.score.kernel[...]
    assert float(jnp.std(pooler)) > 0.01 and float(jnp.std(score)) > 0.005
    assert not model.score.bias[...].any()


@pytest.mark.nightly
@pytest.mark.parametrize("task", [TaskType.MASKED_LM, TaskType.TOKEN_CLASSIFICATION])
def test_tasks_without_a_pooler_start_from_a_body_with_a_pooler(
    tmp_path: Path, task: TaskType
) -> None:
    config = registry.get_config("bert")(**BERT, sharding_axis_dims=ONE)
    body = registry.get_module(TaskType.BASE_MODULE, "bert").create(config, seed=0)
    body.save_pretrained(tmp_path)
    model = registry.get_module(task, "bert").from_pretrained(tmp_path, sharding_axis_dims=ONE)
    np.testing.assert_array_equal(
        model.model.embed_tokens.embedding[...], body.embed_tokens.embedding[...]
    )


@pytest.mark.torch
def test_deberta_head_of_the_original_release_has_equal_logits(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    fields = {**cases("deberta-v2")["deberta-v2"].rows["v3"], "legacy": False}
    torch.manual_seed(0)
    theirs = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**fields)).eval()
    with torch.no_grad():
        theirs.lm_predictions.lm_head.bias.normal_()
    theirs.save_pretrained(tmp_path)
    model = AutoEasyDeLModelForMaskedLM.from_pretrained(tmp_path, sharding_axis_dims=ONE)
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS).long()).logits.numpy()
    np.testing.assert_allclose(forward(model, input_ids=IDS).logits, expected, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    again = transformers.DebertaV2ForMaskedLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        logits = again(torch.tensor(IDS).long()).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.nightly
def test_bert_scores_packed_documents_as_it_scores_them_alone() -> None:
    config = BertConfig(**BERT, num_labels=3, sharding_axis_dims=ONE)
    model = BertForSequenceClassification.create(config, seed=0)
    alone = [model(IDS[:1, at]).logits[0] for at in (slice(0, 5), slice(5, 12))]
    segments = np.asarray([[1] * 5 + [2] * 7], np.int32)
    packed = model(IDS[:1], segment_ids=segments, logits_at="all").logits[0]
    np.testing.assert_allclose(packed[np.asarray([0, 5])], np.stack(alone), atol=1e-5)
    with pytest.raises(ConfigError, match="several first tokens"):
        model(IDS[:1], segment_ids=segments)


@pytest.mark.nightly
def test_encoder_has_no_cache_and_refuses_the_options_of_decoders() -> None:
    config = BertConfig(**BERT, num_labels=3, sharding_axis_dims=ONE)
    model = BertForSequenceClassification.create(config, seed=0)
    with pytest.raises(TypeError, match="BertModel has no layers that keep keys and values"):
        model.init_cache(1, 8)
    with pytest.raises(ConfigError, match="is_decoder=True is not supported"):
        BertConfig(**BERT, is_decoder=True)


@pytest.mark.nightly
def test_text_longer_than_the_position_table_is_refused() -> None:
    fields = {**cases("roberta")["roberta"].rows["encoder"], "max_position_embeddings": 14}
    config = AutoEasyDeLConfig.for_model("roberta", **fields, sharding_axis_dims=ONE)
    assert longest_sequence(config) == 12
    model = AutoEasyDeLModel.from_config(config)
    assert model(IDS).last_hidden_state.shape == (3, 12, 32)
    with pytest.raises(ConfigError, match=r"a row has 13 tokens, but .* for 12"):
        model(np.pad(IDS, ((0, 0), (0, 1)), constant_values=5))


@pytest.mark.nightly
@pytest.mark.parametrize("scan", [True, False])
def test_bert_dropout_acts_in_training_only(scan: bool) -> None:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    for rate in (*none, "classifier_dropout"):
        config = BertConfig(
            **BERT, **{**none, rate: 0.5}, num_labels=3, scan_layers=scan, sharding_axis_dims=ONE
        )
        model = BertForSequenceClassification.create(config, seed=0)
        still, first, again, other = (
            model(IDS, key=key).logits for key in (None, *map(jax.random.key, (1, 1, 2)))
        )
        np.testing.assert_array_equal(first, again)
        assert jnp.abs(first - still).max() > 1e-6, rate
        assert jnp.abs(first - other).max() > 1e-6, rate


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("subject", subjects("t5"), ids=str)
def test_t5_beams_equal_transformers(subject: Subject) -> None:
    torch = pytest.importorskip("torch")
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 10}
    ours = subject.model.generate(**subject.prompts(), **options, eos_token_id=[])
    theirs = subject.torch_model.generate(
        input_ids=torch.tensor(subject.ids, dtype=torch.long),
        attention_mask=torch.tensor(subject.mask),
        min_new_tokens=10,
        do_sample=False,
        **options,
    )
    np.testing.assert_array_equal(ours.sequences, theirs.numpy())


@pytest.mark.nightly
def test_t5_head_follows_the_checkpoint(tmp_path: Path) -> None:
    tied = T5ForConditionalGeneration.create(T5Config(**T5, sharding_axis_dims=ONE), seed=0)
    assert tied.is_tied and not hasattr(tied, "lm_head")
    config = T5Config(**T5, tie_word_embeddings=False, sharding_axis_dims=ONE)
    separate = T5ForConditionalGeneration.create(config, seed=0)
    separate.save_pretrained(tmp_path)
    again = AutoEasyDeLModelForSeq2SeqLM.from_pretrained(
        tmp_path, sharding_axis_dims=ONE, dtype=jnp.float32, param_dtype=jnp.float32
    )
    assert not again.is_tied
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    np.testing.assert_array_equal(
        forward(again, **inputs).logits, forward(separate, **inputs).logits
    )


@pytest.mark.nightly
def test_t5_dropout_differs_between_encoder_and_decoder_and_needs_a_key() -> None:
    config = T5Config(**{**T5, "dropout_rate": 0.4}, sharding_axis_dims=ONE)
    model = T5ForConditionalGeneration.create(config, seed=0)
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    still = model(**inputs).logits
    np.testing.assert_array_equal(model(**inputs).logits, still)
    first, again, other = (
        model(**inputs, key=key).logits for key in map(jax.random.key, (1, 1, 2))
    )
    np.testing.assert_array_equal(first, again)
    assert jnp.abs(first - still).max() > 1e-6 and jnp.abs(first - other).max() > 1e-6


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("deberta-v2", {"attention_head_size": 40}, "attention_head_size=40 does not fit"),
        ("deberta-v2", {"pooler_hidden_size": 8}, "pooler_hidden_size"),
        (
            "nomic_bert",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 in rope_parameters is not supported",
        ),
        ("wav2vec2", {"adapter_attn_dim": 8}, "has an effect only with do_stable_layer_norm=True"),
        ("longt5", {"encoder_attention_type": "all"}, "'all' must be one of local, transient-"),
    ],
)
def test_unsupported_setting_raises_config_error_with_its_field(model_type, fields, message):
    with pytest.raises(ConfigError, match=message):
        registry.get_config(model_type)(**fields)
