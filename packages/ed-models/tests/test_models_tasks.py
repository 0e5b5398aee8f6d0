"""Classifiers, reward models, embedders and bodies: from any checkpoint, by any way of asking."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.logging import forget_said
from ed_models import (
    AutoEasyDeLModel,
    AutoEasyDeLModelForCausalLM,
    AutoEasyDeLModelForEmbedding,
    AutoEasyDeLModelForReward,
    AutoEasyDeLModelForSequenceClassification,
)
from ed_models.checkpoints import hub
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM, LlamaModel
from ed_models.tasks.classification import SequenceClassifier
from ed_models.tasks.pooling import Pooling
from ed_models.tasks.sentence_modules import SentenceModules
from flax import nnx
from safetensors.numpy import load_file

ONE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
IDS = np.random.default_rng(0).integers(3, 64, (3, 8)).astype(np.int32)
MASK = np.array([[1] * 8, [0] * 3 + [1] * 5, [1] * 6 + [0] * 2], np.int32)


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM.create(LlamaConfig(**SHAPE, **ONE), seed=1)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "model"
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def said(caplog):
    forget_said()
    with caplog.at_level("WARNING", "easydel"):
        yield caplog


@pytest.fixture(scope="module")
def hidden(model):
    """Hidden states of the rows, [b, s, d]."""
    return np.asarray(model.model(IDS, attention_mask=MASK).last_hidden_state)


class TestBodies:
    def test_from_a_checkpoint_with_a_head(self, hidden, saved):
        body = AutoEasyDeLModel.from_pretrained(saved, **ONE)
        assert type(body) is LlamaModel
        got = body(IDS, attention_mask=MASK).last_hidden_state
        np.testing.assert_array_equal(np.asarray(got), hidden)

    def test_the_class_loads_itself_and_saves_without_the_first_part(self, saved, tmp_path):
        body = LlamaModel.from_pretrained(saved, **ONE)
        body.save_pretrained(tmp_path / "body")
        names = load_file(tmp_path / "body/model.safetensors")
        assert "embed_tokens.weight" in names and "layers.1.mlp.up_proj.weight" in names
        config = json.loads((tmp_path / "body/config.json").read_text())
        assert config["architectures"] == ["LlamaModel"]
        again = hub.from_pretrained(tmp_path / "body", task="auto-bind", **ONE)
        assert type(again) is LlamaModel

    def test_a_family_on_the_body_of_another(self, tmp_path):
        from ed_models.tasks.embedding import derive_body_class
        from ed_models.weights.rules import STANDARD, renamed

        class Other(LlamaForCausalLM):
            WEIGHTS = renamed({"model": "transformer", "layers": "h"}, *STANDARD)

        body = derive_body_class(Other)
        assert body is not LlamaModel and issubclass(body, LlamaModel)
        body.create(LlamaConfig(**SHAPE, **ONE)).save_pretrained(tmp_path / "m")
        assert "h.0.mlp.up_proj.weight" in load_file(tmp_path / "m/model.safetensors")


class TestClassifiers:
    @pytest.mark.nightly
    def test_checkpoint_of_other_task_gets_random_head_with_warning(self, hidden, saved, said):
        options = {**ONE, "config_kwargs": {"num_labels": 3}}
        make = AutoEasyDeLModelForSequenceClassification.from_pretrained
        classifier = make(saved, **options)
        assert isinstance(classifier, SequenceClassifier)
        assert "score.weight of LlamaForSequenceClassification is randomly initialized" in said.text
        kernel = np.asarray(classifier.score.kernel.get_value())
        assert kernel.shape == (16, 3) and kernel.std() > 0
        np.testing.assert_array_equal(make(saved, **options).score.kernel.get_value(), kernel)
        want = hidden[[0, 1, 2], [7, 7, 5]] @ kernel
        got = classifier(IDS, attention_mask=MASK)
        np.testing.assert_allclose(got.logits, want, atol=1e-6)
        # Without a mask, tokens other than the padding id are counted.
        ids = np.where(MASK, IDS, 0)
        got = classifier(ids[2:], attention_mask=None).logits
        np.testing.assert_allclose(got, want[2:], atol=1e-6)

    def test_a_classifier_without_its_head_is_damaged(self, saved, tmp_path):
        directory = shutil.copytree(saved, tmp_path / "m")
        config = json.loads((directory / "config.json").read_text())
        config["architectures"] = ["LlamaForSequenceClassification"]
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"missing \(1\):\n    score\.weight"):
            hub.from_pretrained(directory, task="auto-bind", **ONE)

    @pytest.mark.nightly
    def test_rows_without_an_end_are_refused(self):
        config = LlamaConfig(**{**SHAPE, "pad_token_id": None}, **ONE)
        classifier = AutoEasyDeLModelForSequenceClassification.from_config(config)
        with pytest.raises(ConfigError, match="the padding of 3 rows is unknown"):
            classifier(IDS)
        assert classifier(IDS[:1]).logits.shape == (1, 2)
        assert classifier(IDS, attention_mask=MASK).logits.shape == (3, 2)

    @pytest.mark.daily("labels4-2-multi_label_classification")
    @pytest.mark.parametrize(
        ("labels", "count", "problem"),
        [
            (np.array([0.5, -1.0, 2.0], np.float32), 1, None),
            (np.array([0, 2, 1]), 3, None),
            (np.array([[0, 1], [1, 1], [0, 0]], np.float32), 2, None),
            (np.array([[0, 1], [1, 1], [0, 0]], np.float32), 2, "regression"),
            (np.array([[0, 1], [1, 1], [0, 0]]), 2, "multi_label_classification"),
        ],
    )
    @pytest.mark.torch
    def test_classifier_losses_match_transformers(self, labels, count, problem):
        torch = pytest.importorskip("torch")
        from transformers.loss.loss_utils import ForSequenceClassificationLoss

        config = LlamaConfig(**SHAPE, **ONE, num_labels=count, problem_type=problem)
        classifier = AutoEasyDeLModelForSequenceClassification.from_config(
            config, dtype="float32", param_dtype="float32"
        )
        out, rows = classifier.compute_loss(IDS, labels, attention_mask=MASK)
        logits = torch.tensor(np.asarray(out.logits))
        theirs = torch.tensor(labels)
        if problem == "multi_label_classification":
            theirs = theirs.float()
        want = ForSequenceClassificationLoss(theirs, logits, config.replace())
        np.testing.assert_allclose(float(out.loss), float(want), rtol=1e-6)
        assert rows == 3

    @pytest.mark.nightly
    def test_unknown_problem_type_raises_config_error(self):
        config = LlamaConfig(**SHAPE, **ONE)
        config.problem_type = "ranking"
        classifier = AutoEasyDeLModelForSequenceClassification.from_config(config)
        with pytest.raises(ConfigError, match="problem_type is 'ranking'"):
            classifier.compute_loss(IDS, np.array([0, 1, 1]), attention_mask=MASK)


class TestRewards:
    @pytest.mark.nightly
    def test_every_token_of_packed_rows(self, saved):
        reward = AutoEasyDeLModelForReward.from_pretrained(saved, **ONE)
        ids = np.asarray(IDS[:1])
        alone = reward(ids, attention_mask=np.ones_like(ids)).logits
        twice = np.concatenate([ids, ids], axis=1)
        segments = np.repeat([[1, 2]], ids.shape[1], axis=1)
        every = reward(twice, segment_ids=segments, logits_at="all").logits
        assert every.shape == (*twice.shape, 1)
        for end in (ids.shape[1] - 1, twice.shape[1] - 1):
            np.testing.assert_allclose(every[:, end], alone, atol=1e-5)
        with pytest.raises(ConfigError, match="several last tokens"):
            reward(twice, segment_ids=segments)

    @pytest.mark.nightly
    def test_reward_model_has_one_label(self, saved, tmp_path):
        reward = AutoEasyDeLModelForReward.from_pretrained(saved, **ONE)
        assert reward(IDS, attention_mask=MASK).logits.shape == (3, 1)
        reward.save_pretrained(tmp_path / "reward")
        again = AutoEasyDeLModelForReward.from_pretrained(tmp_path / "reward", **ONE)
        np.testing.assert_array_equal(
            again(IDS, attention_mask=MASK).logits, reward(IDS, attention_mask=MASK).logits
        )
        made = AutoEasyDeLModelForReward.from_config(LlamaConfig(**SHAPE, **ONE))
        assert made.score.kernel.shape == (16, 1)

    @pytest.mark.nightly
    def test_several_labels_are_no_reward(self, tmp_path):
        config = LlamaConfig(**SHAPE, **ONE, num_labels=4)
        made = AutoEasyDeLModelForSequenceClassification.from_config(config)
        made.save_pretrained(tmp_path / "m")
        with pytest.raises(CheckpointError, match="with 4 labels, but a reward model has one"):
            AutoEasyDeLModelForReward.from_pretrained(tmp_path / "m")


def reference(states, mode):
    """What sentence-transformers computes (Pooling.py), row by row without padding."""
    rows = [row[m != 0] for row, m in zip(states, MASK, strict=True)]
    n = [len(row) for row in rows]
    return np.stack(
        {
            "cls": [row[0] for row in rows],
            "lasttoken": [row[-1] for row in rows],
            "max": [row.max(0) for row in rows],
            "mean": [row.mean(0) for row in rows],
            "mean_sqrt_len_tokens": [r.sum(0) / k**0.5 for r, k in zip(rows, n, strict=True)],
            "weightedmean": [
                np.average(r, axis=0, weights=np.arange(1, k + 1))
                for r, k in zip(rows, n, strict=True)
            ],
        }[mode]
    )


class TestEmbedders:
    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize(
        "mode", ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
    )
    def test_pooling_modes_match_reference(self, hidden, tmp_path, mode, normalize):
        want = reference(hidden, mode)
        if normalize:
            want /= np.linalg.norm(want, axis=1, keepdims=True)
        pooling = Pooling.of(mode, normalize)
        np.testing.assert_allclose(pooling(hidden, MASK), want, atol=1e-6)
        SentenceModules(pooling).write(tmp_path, 16)
        found = SentenceModules.read(tmp_path)
        assert found is not None and found.pooling == pooling

    @pytest.mark.daily("lasttoken", "mean", "mean_sqrt_len_tokens", "weightedmean")
    @pytest.mark.parametrize(
        "mode", ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
    )
    def test_packed_texts_are_pooled_each_by_itself(self, hidden, mode):
        pairs = zip(hidden, MASK, strict=True)
        real = [np.asarray(row)[np.asarray(mask) > 0] for row, mask in pairs]
        packed = np.concatenate([*real, np.full((2, 16), 9.0)])[None]
        ids = np.repeat([1, 2, 3, 0], [*map(len, real), 2])[None]
        pooling = Pooling.of(mode, True)
        found = pooling.pool_segments(jnp.asarray(packed), jnp.asarray(ids), 4)
        np.testing.assert_allclose(found[0, :3], pooling(hidden, MASK), atol=1e-6)
        assert not np.any(found[0, 3]), "there is no fourth text"

    def test_embedder_requires_segments_with_segment_ids(self, saved):
        embedder = AutoEasyDeLModelForEmbedding.from_pretrained(saved, **ONE)
        with pytest.raises(ConfigError, match="segment_ids and segments must be passed together"):
            embedder(IDS, segment_ids=MASK)

    @pytest.mark.nightly
    def test_a_checkpoint_of_another_task(self, hidden, saved, tmp_path):
        embedder = AutoEasyDeLModelForEmbedding.from_pretrained(saved, pooling_mode="last", **ONE)
        got = embedder(IDS, attention_mask=MASK).embeddings
        np.testing.assert_allclose(got, reference(hidden, "lasttoken"), atol=1e-6)
        embedder.save_pretrained(tmp_path / "m")
        again = hub.from_pretrained(tmp_path / "m", task="auto-bind", **ONE)
        assert type(again) is type(embedder) and again.pooling == Pooling("lasttoken")
        made = AutoEasyDeLModelForEmbedding.from_config(again.config, normalize=True)
        assert made.pooling == Pooling("mean", normalize=True)

    @pytest.mark.nightly
    def test_files_are_those_of_sentence_transformers(self, saved, tmp_path):
        make = AutoEasyDeLModelForEmbedding.from_pretrained
        make(saved, pooling_mode="last", normalize=True, **ONE).save_pretrained(tmp_path / "m")
        modules = json.loads((tmp_path / "m/modules.json").read_text())
        assert [m["type"].rpartition(".")[2] for m in modules] == [
            "Transformer",
            "Pooling",
            "Normalize",
        ]
        settings = json.loads((tmp_path / "m/1_Pooling/config.json").read_text())
        assert [k for k, v in settings.items() if v is True and k.startswith("pooling")] == [
            "pooling_mode_lasttoken"
        ]
        assert settings["word_embedding_dimension"] == 16
        config = json.loads((tmp_path / "m/config.json").read_text())
        assert config["architectures"] == ["LlamaModel"]
        # A language model in its place is no embedder any more.
        LlamaForCausalLM.create(LlamaConfig(**SHAPE, **ONE)).save_pretrained(tmp_path / "m")
        assert isinstance(
            hub.from_pretrained(tmp_path / "m", task="auto-bind", **ONE), LlamaForCausalLM
        )

    def test_invalid_pooling_modes_raise_error(self, saved, tmp_path):
        with pytest.raises(ConfigError, match="unknown pooling mode 'maen'; did you mean 'mean'"):
            AutoEasyDeLModelForEmbedding.from_pretrained(saved, pooling_mode="maen")
        directory = shutil.copytree(saved, tmp_path / "m")
        (directory / "modules.json").write_text('[{"type": "a.Transformer", "path": ""}]')
        with pytest.raises(CheckpointError, match="lists the modules Transformer; an embedding"):
            AutoEasyDeLModelForEmbedding.from_pretrained(directory, **ONE)
        SentenceModules(Pooling()).write(directory, 16)
        for modes in ({"pooling_mode_cls_token": False}, {"pooling_mode": ["cls", "maen"]}):
            (directory / "1_Pooling/config.json").write_text(json.dumps(modes))
            with pytest.raises(CheckpointError, match="these modes are supported: cls, max, mean"):
                AutoEasyDeLModelForEmbedding.from_pretrained(directory, **ONE)


class TestAutoBind:
    @pytest.mark.parametrize(
        ("architecture", "expected"),
        [
            ("LlamaForCausalLM", "LlamaForCausalLM"),
            ("GPT2LMHeadModel", "LlamaForCausalLM"),
            (None, "LlamaForCausalLM"),
            ("LlamaModel", "LlamaModel"),
        ],
    )
    def test_checkpoint_architecture_selects_the_task(
        self, saved, tmp_path, architecture, expected
    ):
        directory = shutil.copytree(saved, tmp_path / "m")
        config = json.loads((directory / "config.json").read_text())
        config["architectures"] = architecture and [architecture]
        (directory / "config.json").write_text(json.dumps(config))
        model = hub.from_pretrained(directory, task="auto-bind", **ONE)
        assert type(model).__name__ == expected

    def test_a_task_that_is_not_here(self, saved, tmp_path):
        directory = shutil.copytree(saved, tmp_path / "m")
        (directory / "config.json").write_text(
            '{"model_type": "llama", "architectures": ["LlamaForObjectDetection"]}'
        )
        with pytest.raises(CheckpointError, match="its class is LlamaForObjectDetect"):
            hub.from_pretrained(directory, task="auto-bind")


def test_registry_derives_task_classes():
    tasks = registry.list_tasks("gpt2")
    assert len(tasks) == len(set(tasks)) == 4 and TaskType.EMBEDDING in tasks
    made = registry.get_module("sequence-classification", "gpt2")
    assert made.__name__ == "GPT2ForSequenceClassification" and made.model_type == "gpt2"
    assert registry.get_module("sequence_classification", "gpt2") is made
    with pytest.raises(registry.RegistryError, match="no image-classification module"):
        registry.get_module("image-classification", "gpt2")


@pytest.mark.torch
class TestToTorch:
    def test_to_torch_model_produces_equal_logits(self, model):
        torch = pytest.importorskip("torch")
        theirs = model.to_torch()
        assert type(theirs).__name__ == "LlamaForCausalLM"
        with torch.no_grad():
            want = theirs(torch.tensor(IDS, dtype=torch.long)).logits.numpy()
        np.testing.assert_allclose(model(IDS).logits, want, atol=1e-5)

    def test_to_torch_keeps_task_and_dtype(self, saved):
        torch = pytest.importorskip("torch")
        kinds = {
            AutoEasyDeLModel: "LlamaModel",
            AutoEasyDeLModelForEmbedding: "LlamaModel",
            AutoEasyDeLModelForReward: "LlamaForSequenceClassification",
        }
        for auto, name in kinds.items():
            theirs = auto.from_pretrained(saved, param_dtype=jnp.bfloat16, **ONE).to_torch()
            assert type(theirs).__name__ == name and theirs.dtype == torch.bfloat16

    def test_to_torch_requires_torch(self, model, monkeypatch):
        from ed_models.base import export

        monkeypatch.setattr(export, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="to_torch needs torch, which is not installed"):
            model.to_torch()

    def test_to_torch_rejects_model_without_counterpart(self, monkeypatch):
        pytest.importorskip("torch")

        class Own(LlamaForCausalLM):
            pass

        own = Own.create(LlamaConfig(**SHAPE, **ONE))
        monkeypatch.setattr(type(own.config), "model_type", "nobodys")
        with pytest.raises(ConfigError, match=r"transformers has no .* of model type 'nobodys'"):
            own.to_torch()


@pytest.mark.nightly
@pytest.mark.parametrize("auto", [AutoEasyDeLModelForCausalLM, AutoEasyDeLModelForReward])
def test_sharded_load_equals_single_device_load(saved, auto):
    one = auto.from_pretrained(saved, **ONE)
    many = auto.from_pretrained(saved, sharding_axis_dims=(1, 4, 1, 2, 1))
    for a, b in zip(
        nnx.to_flat_state(nnx.state(one)), nnx.to_flat_state(nnx.state(many)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a[1].get_value()), np.asarray(b[1].get_value()))
