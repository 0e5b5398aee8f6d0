"""Loading and saving directories: placement, dtypes, replacement, and every way to be wrong."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError, RegistryError
from ed_infra.logging import forget_said
from ed_models import (
    AutoEasyDeLConfig,
    AutoEasyDeLModelForCausalLM,
    AutoEasyDeLModelForReward,
)
from ed_models.checkpoints import filling, hub, loading, saving, tensor_files
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx
from safetensors.numpy import load_file, save_file

ONE = (1, 1, 1, 1, 1)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(**SHAPE, sharding_axis_dims=ONE)
    return LlamaForCausalLM.create(config, seed=1, dtype=jnp.float32, param_dtype=jnp.float32)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A checkpoint in several files; tests that change it copy it."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    model.save_pretrained(directory, max_shard_size="10KB")
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def load(directory, dims=ONE, **options):
    return AutoEasyDeLModelForCausalLM.from_pretrained(
        directory, sharding_axis_dims=dims, **options
    )


def tensors(directory):
    merged = {}
    for file in directory.glob("*.safetensors"):
        merged |= load_file(file)
    return merged


def rewrite(directory, content):
    """Replace all weights by one file."""
    for file in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    save_file(content, directory / "model.safetensors")


def equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.proves("model.save_pretrained")
def test_saved_directory_has_hugging_face_layout(saved):
    names = sorted(p.name for p in saved.iterdir())
    assert names[:2] == ["config.json", "generation_config.json"]
    assert names[-1] == "model.safetensors.index.json"
    assert all(n.startswith("model-0000") for n in names[2:-1])
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["model_type"], config["dtype"]) == ("llama", "float32")
    stored = tensors(saved)
    assert stored["model.layers.2.mlp.down_proj.weight"].shape == (16, 24)
    assert len(stored) == 3 * 9 + 3


@pytest.mark.daily("dims2-True")
@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("dims", [ONE, (1, 2, 1, 4, 1), (8, 1, 1, 1, 1)])
@pytest.mark.proves("AutoEasyDeLModelForCausalLM.from_pretrained")
def test_values_are_the_same_on_any_mesh(model, saved, dims, scan_layers):
    again = load(saved, dims, config_kwargs={"scan_layers": scan_layers})
    assert again.mesh.size == np.prod(dims)
    want = model if scan_layers else model.to_layout("leaves")
    assert equal(nnx.state(again), nnx.state(want))
    kernel = again.lm_head.kernel.get_value()
    parts = {s.data.shape for s in kernel.addressable_shards}
    assert parts == {(16 // dims[1], 64 // dims[3])}


@pytest.mark.parametrize("dims", [ONE, (1, 2, 1, 4, 1), (8, 1, 1, 1, 1)])
@pytest.mark.daily("dims1")
def test_large_stacks_are_filled_layer_by_layer(model, saved, dims, monkeypatch):
    filled, original = [], filling._build_array

    def spy(shape, *rest):
        filled.append(shape)
        return original(shape, *rest)

    monkeypatch.setattr(filling, "_build_array", spy)
    monkeypatch.setattr(filling, "_LARGE", 1)
    monkeypatch.setattr(filling, "_in_host_memory", lambda placement: False)
    monkeypatch.setattr(tensor_files, "_KEPT", 1)  # pages are let go after each read
    again = load(saved, dims)
    assert filled.count((16, 24)) == 2 * 3 and (3, 16, 24) not in filled
    assert equal(nnx.state(again), nnx.state(model))
    placement = {a.sharding for a in jax.tree.leaves(nnx.state(load(saved, dims)))}
    assert {a.sharding for a in jax.tree.leaves(nnx.state(again))} == placement
    alone = load(saved, dims, auto_shard_model=False)
    assert equal(nnx.state(alone), nnx.state(model))


def test_a_device_reads_only_its_slice(saved, monkeypatch):
    from ed_models.checkpoints.tensor_files import TensorFiles

    read, original = [], TensorFiles.read

    def spy(self, name, index=()):
        value = original(self, name, index)
        read.append((name, value.size))
        return value

    monkeypatch.setattr(TensorFiles, "read", spy)
    load(saved, (1, 2, 1, 4, 1))
    of_head = [size for name, size in read if name == "lm_head.weight"]
    assert of_head == [16 * 64 // 8] * 8


def test_parameters_are_converted_once_and_directly(model, copy):
    # bfloat16 reaches beyond float16: a detour through float16 would overflow.
    content = {n: v.astype(ml_dtypes.bfloat16) for n, v in tensors(copy).items()}
    content["lm_head.weight"] = content["lm_head.weight"] * ml_dtypes.bfloat16(1e30)
    rewrite(copy, content)
    wide = load(copy, param_dtype=jnp.float32)
    got = np.asarray(wide.lm_head.kernel.get_value())
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, content["lm_head.weight"].T.astype(np.float32))
    narrow = load(copy, dtype=jnp.float32, param_dtype=jnp.bfloat16)
    assert narrow.lm_head.kernel.get_value().dtype == jnp.bfloat16
    assert narrow.dtype == jnp.float32


@pytest.mark.proves("AutoEasyDeLModelForCausalLM.from_pretrained(auto_shard_model)")
def test_unsharded_load_places_parameters_on_one_device(saved):
    model = load(saved, (1, 8, 1, 1, 1), auto_shard_model=False)
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(nnx.state(model))} == {1}


def test_partition_rules_override_default_sharding(saved):
    rules = [("lm_head/kernel", (None, "fsdp"))]
    model = load(saved, (1, 8, 1, 1, 1), partition_rules=rules)
    kernel = model.lm_head.kernel.get_value()
    assert {s.data.shape for s in kernel.addressable_shards} == {(16, 8)}
    with pytest.raises(ConfigError, match="matches no parameter"):
        load(saved, partition_rules=[("lm_haed/kernel", (None, "fsdp"))])


@pytest.mark.proves("EasyBridgeMixin")
def test_model_class_loads_its_own_checkpoint(saved, model):
    again = LlamaForCausalLM.from_pretrained(saved, sharding_axis_dims=ONE)
    assert equal(nnx.state(again), nnx.state(model))


def test_unknown_load_options_raise_error(saved):
    with pytest.raises(TypeError, match="did you mean 'dtype'"):
        load(saved, dtyp=jnp.float32)
    with pytest.raises(ConfigError, match="did you mean 'attn_mechanism'"):
        load(saved, config_kwargs={"attn_mechansim": "vanilla"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("foo", r"no keyword 'foo' \(known: allow_pickle, "),
        ("dtpye", "did you mean 'dtype'"),
        ("revison", "did you mean 'revision'"),
        ("torch_dtype", "use dtype and param_dtype"),
        ("device_map", "use sharding_axis_dims"),
        ("load_in_4bit", "'dtype': 'nf4'"),
        ("attn_mechanism", r"field of the configuration: use config_kwargs=\{'attn_mechanism'"),
        ("scan_attention_layers", "use config_kwargs"),
        ("trust_remote_code", "omit it: no code of a repository is run"),
    ],
)
def test_unknown_keyword_of_from_pretrained_says_what_to_write(saved, name, words):
    kinds = (AutoEasyDeLModelForCausalLM, LlamaForCausalLM)
    for kind in kinds:
        with pytest.raises(ConfigError, match=f"^from_pretrained has no keyword '{name}'") as error:
            kind.from_pretrained(saved, **{name: True})
        assert re.search(words, str(error.value))


def test_fields_of_labels_are_keywords_of_from_pretrained(saved):
    labels = {"problem_type": "multi_label_classification", "id2label": {0: "a", 1: "b", 2: "c"}}
    config = load(saved, **labels, label2id={"a": 0, "b": 1, "c": 2}).config
    assert (config.num_labels, config.problem_type) == (3, labels["problem_type"])
    assert load(saved, num_labels=7).config.num_labels == 7
    with pytest.raises(ConfigError, match="one label, got num_labels=2"):
        AutoEasyDeLModelForReward.from_pretrained(saved, num_labels=2)


def test_saved_model_has_the_tokenizer_of_its_checkpoint(copy, tmp_path):
    (copy / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    for name in ("tokenizer_config.json", "chat_template.jinja", "merges.txt"):
        (copy / name).write_text(name)
    (copy / "preprocessor_config.json").write_text("{}")
    (copy / "notes.json").write_text("{}")
    model = load(copy)
    model.save_pretrained(tmp_path / "new")
    kept = {file.name for file in saving.find_tokenizer_files(tmp_path / "new")}
    assert kept == {file.name for file in saving.find_tokenizer_files(copy)} and len(kept) == 5
    assert (tmp_path / "new/chat_template.jinja").read_text() == "chat_template.jinja"
    assert not (tmp_path / "new/notes.json").exists()
    # A tokenizer that is already there, or given, stays.
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("mine")
    model.save_pretrained(other)
    assert (other / "tokenizer.json").read_text() == "mine"
    assert not (other / "merges.txt").exists()
    assert saving.find_stored_tokenizer("no/such-model", tmp_path / "x") is None
    assert saving.find_stored_tokenizer("a/b/c", tmp_path / "x") is None
    model.save_pretrained(copy)
    assert (copy / "merges.txt").read_text() == "merges.txt"


def test_auto_config_loads_only_configuration(saved):
    config = AutoEasyDeLConfig.from_pretrained(saved, scan_layers=False)
    assert isinstance(config, LlamaConfig)
    assert (config.hidden_size, config.scan_layers) == (16, False)


@pytest.mark.nightly
def test_from_config_is_random_and_seeded():
    config = LlamaConfig(**SHAPE, sharding_axis_dims=(1, 8, 1, 1, 1))
    make = AutoEasyDeLModelForCausalLM.from_config
    a, b, c = make(config, seed=3), make(config, rngs=nnx.Rngs(5)), make(config, rngs=nnx.Rngs(5))
    assert a.lm_head.kernel.get_value().dtype == jnp.bfloat16
    assert equal(nnx.state(b), nnx.state(c))
    assert not equal(nnx.state(a), nnx.state(b))


class TestBadCheckpoints:
    def test_missing_and_left_over_with_the_nearest_name(self, copy):
        content = tensors(copy)
        content["model.layers.1.mlp.up_porj.weight"] = content.pop(
            "model.layers.1.mlp.up_proj.weight"
        )
        rewrite(copy, content)
        with pytest.raises(CheckpointError) as error:
            load(copy)
        text = str(error.value)
        assert "missing (1):\n    model.layers.1.mlp.up_proj.weight; did you mean 'model.la" in text
        assert "not in the model (1):\n    model.layers.1.mlp.up_porj.weight" in text

    def test_shape_mismatches_are_all_listed_with_both_shapes(self, copy):
        content = tensors(copy)
        content["model.norm.weight"] = np.ones((17,), np.float32)
        content["lm_head.weight"] = content["lm_head.weight"].T.copy()
        rewrite(copy, content)
        with pytest.raises(CheckpointError) as error:
            load(copy)
        text = str(error.value)
        assert "model.norm.weight: the file has [17], the model [16]" in text
        assert "lm_head.weight: the file has [16, 64], the model [64, 16]" in text

    def test_checkpoint_with_too_few_layers_raises_checkpoint_error(self, copy):
        content = {n: v for n, v in tensors(copy).items() if ".layers.2." not in n}
        rewrite(copy, content)
        with pytest.raises(CheckpointError, match=r"missing \(9\)"):
            load(copy)

    def test_a_head_that_is_tied_may_lie_in_the_file(self, copy):
        content = tensors(copy)
        assert load(copy, config_kwargs={"tie_word_embeddings": True}) is not None
        del content["lm_head.weight"]
        rewrite(copy, content)
        assert load(copy, config_kwargs={"tie_word_embeddings": True}) is not None
        with pytest.raises(CheckpointError, match=r"missing \(1\):\n    lm_head\.weight"):
            load(copy)

    def test_tensors_of_other_dtype_kind_raise_checkpoint_error(self, copy):
        content = tensors(copy)
        content["model.norm.weight"] = np.ones((16,), np.int8)
        content["lm_head.weight"] = content["lm_head.weight"] > 0
        rewrite(copy, content)
        with pytest.raises(CheckpointError) as error:
            load(copy, param_dtype="bf16")
        text = str(error.value)
        assert "of another kind, as the codes of a quantized checkpoint are" in text
        assert "model.norm.weight: model.safetensors has I8, the model bfloat16" in text
        assert "lm_head.weight: model.safetensors has BOOL, the model bfloat16" in text

    def test_buffers_of_old_checkpoints_are_no_leftovers(self, copy):
        content = tensors(copy)
        content["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones((2,), np.float32)
        rewrite(copy, content)
        load(copy)

    def test_missing_file_raises_checkpoint_error(self, copy):
        next(copy.glob("model-00002*")).unlink()
        with pytest.raises(CheckpointError, match="not there: model-00002"):
            load(copy)

    def test_missing_configuration_raises_checkpoint_error(self, copy):
        (copy / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"has no config\.json"):
            load(copy)

    def test_broken_configuration_raises_checkpoint_error(self, copy):
        (copy / "config.json").write_text("{")
        with pytest.raises(CheckpointError, match="is not a JSON object"):
            load(copy)
        (copy / "config.json").write_text("{}")
        with pytest.raises(CheckpointError, match='has no "model_type"'):
            load(copy)

    def test_unknown_model_type_raises_registry_error(self, copy):
        (copy / "config.json").write_text('{"model_type": "lama"}')
        with pytest.raises(RegistryError, match="did you mean 'llama'"):
            load(copy)


class TestTiedHeads:
    """The files determine the dtype, as in transformers (compared in tests/parity)."""

    TIED = {"config_kwargs": {"tie_word_embeddings": True}}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def said(self, caplog):
        forget_said()
        with caplog.at_level("WARNING", "easydel"):
            yield caplog

    def test_a_head_that_differs_is_loaded(self, copy, said, tmp_path):
        model = load(copy, **self.TIED)
        stored = tensors(copy)
        got = np.asarray(model.lm_head.kernel.get_value())
        np.testing.assert_array_equal(got, stored["lm_head.weight"].T)
        assert not model.config.tie_word_embeddings and not model.is_tied
        assert len(said.records) == 1
        assert f"{copy}: tie_word_embeddings is true, but the files hold a head" in said.text
        model.save_pretrained(tmp_path / "again")
        assert equal(nnx.state(load(tmp_path / "again")), nnx.state(model))
        assert len(said.records) == 1

    def test_one_value_makes_the_difference(self, copy, monkeypatch):
        monkeypatch.setattr(loading, "_BLOCK", 7 * 16)  # several blocks, the last one smaller
        content = tensors(copy)
        head = content["model.embed_tokens.weight"].copy()
        content["lm_head.weight"] = head
        rewrite(copy, content)
        assert load(copy, **self.TIED).is_tied
        head[63, 15] += 1e-6
        rewrite(copy, content)
        assert not load(copy, **self.TIED).is_tied
        # In bfloat16 it is the same matrix.
        assert load(copy, param_dtype=jnp.bfloat16, **self.TIED).is_tied

    def test_only_the_head_is_there(self, copy, said):
        content = tensors(copy)
        del content["model.embed_tokens.weight"]
        rewrite(copy, content)
        model = load(copy, **self.TIED)
        assert model.is_tied and not said.records
        got = np.asarray(model.model.embed_tokens.embedding.get_value())
        np.testing.assert_array_equal(got, content["lm_head.weight"])

    def test_a_head_of_another_shape(self, copy):
        content = tensors(copy)
        content["lm_head.weight"] = content["lm_head.weight"][:-1]
        rewrite(copy, content)
        with pytest.raises(CheckpointError, match=r"lm_head.weight: the file has \[63, 16\]"):
            load(copy, **self.TIED)

    def test_unexpected_tensors_raise_checkpoint_error(self, copy):
        content = tensors(copy)
        content["lm_head.bias"] = np.zeros((64,), np.float32)
        rewrite(copy, content)
        with pytest.raises(CheckpointError, match=r"not in the model \(1\):\n    lm_head\.bias"):
            load(copy, **self.TIED)


def test_a_body_that_was_saved_alone(model, copy):
    content = tensors(copy)
    alone = {n.removeprefix("model."): v for n, v in content.items() if n != "lm_head.weight"}
    rewrite(copy, alone)
    again = load(copy, config_kwargs={"tie_word_embeddings": True})
    assert equal(nnx.state(again.model), nnx.state(model.model))
    with pytest.raises(CheckpointError, match=r"missing \(1\):\n    lm_head\.weight"):
        load(copy)


class TestDtypes:
    def test_short_dtype_names_are_accepted(self, saved, tmp_path):
        model = load(saved, dtype="fp32", param_dtype="bf16")
        assert model.dtype == jnp.float32
        assert model.lm_head.kernel.get_value().dtype == jnp.bfloat16
        model.save_pretrained(tmp_path / "m", dtype="fp16")
        stored = load_file(tmp_path / "m" / "model.safetensors")
        assert {v.dtype for v in stored.values()} == {np.dtype(np.float16)}

    @pytest.mark.parametrize("option", ["dtype", "param_dtype"])
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fp31", "unknown dtype 'fp31'; did you mean"),
            ("int8", "is int8; it must be a floating"),
        ],
    )
    def test_invalid_dtype_names_raise_config_error(
        self, model, saved, tmp_path, option, name, message
    ):
        with pytest.raises(ConfigError, match=message):
            load(saved, **{option: name})
        with pytest.raises(ConfigError, match=message):
            AutoEasyDeLModelForCausalLM.from_config(model.config, **{option: name})
        with pytest.raises(ConfigError, match=message):
            model.save_pretrained(tmp_path / "m", dtype=name)


class TestGenerationSettings:
    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("{", "Expecting property name"),
            ("[]", "it is not a JSON object"),
            ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>'; it must be a token id"),
            ('{"pad_token_id": 1.5}', "pad_token_id is 1.5"),
        ],
    )
    def test_broken_generation_settings_raise_checkpoint_error(self, copy, text, why):
        path = copy / "generation_config.json"
        path.write_text(text)
        with pytest.raises(CheckpointError) as error:
            load(copy)
        assert str(error.value).startswith(f"{path} cannot be used: ")
        assert why in str(error.value)

    def test_missing_generation_config_loads_as_none(self, copy):
        (copy / "generation_config.json").unlink()
        assert load(copy).generation_json is None


class TestWhere:
    def test_missing_directory_raises_checkpoint_error(self, tmp_path):
        for name in (tmp_path / "absent", "./absent", "~/absent"):
            with pytest.raises(CheckpointError, match="is not there; give the directory"):
                hub.resolve(name)

    def test_file_instead_of_directory_raises_checkpoint_error(self, saved):
        with pytest.raises(CheckpointError, match="is a file; give the directory"):
            hub.resolve(saved / "config.json")

    def test_a_repository_that_cannot_be_asked(self, tmp_path):
        with pytest.raises(CheckpointError, match="not in the hub's local cache"):
            hub.resolve("nobody/nothing", cache_dir=tmp_path, local_files_only=True)

    def test_no_name_of_a_repository(self):
        with pytest.raises(CheckpointError, match="neither a directory here nor a repository"):
            hub.resolve("a/b/c")

    def test_model_loads_from_local_hub_cache(self, saved, tmp_path):
        repo = tmp_path / "models--org--tiny"
        shutil.copytree(saved, repo / "snapshots" / "abc")
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("abc")
        model = load("org/tiny", cache_dir=tmp_path, local_files_only=True)
        assert model.config.hidden_size == 16


class TestSaving:
    def test_one_file_and_another_dtype(self, model, tmp_path):
        model.save_pretrained(tmp_path / "m", dtype="bfloat16")
        stored = load_file(tmp_path / "m" / "model.safetensors")
        assert {v.dtype for v in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        assert config["dtype"] == "bfloat16"

    def test_a_model_is_replaced_and_other_files_stay(self, model, copy):
        (copy / "notes.txt").write_text("mine")
        (copy / "checkpoints").mkdir()
        model.save_pretrained(copy)
        names = {p.name for p in copy.iterdir()}
        assert names == {
            "notes.txt",
            "checkpoints",
            "config.json",
            "generation_config.json",
            "model.safetensors",
        }
        assert equal(nnx.state(load(copy)), nnx.state(model))
        assert [p.name for p in copy.parent.iterdir()] == ["copy"]

    def test_a_failed_save_leaves_the_old_model(self, model, copy, monkeypatch):
        def fail(*_, **__):
            raise OSError("disk full")

        monkeypatch.setattr(saving, "write_tensors", fail)
        before = {p.name: p.read_bytes() for p in copy.iterdir()}
        with pytest.raises(OSError, match="disk full"):
            model.save_pretrained(copy)
        assert {p.name: p.read_bytes() for p in copy.iterdir()} == before
        assert [p.name for p in copy.parent.iterdir()] == ["copy"]

    def test_a_file_is_no_directory(self, model, tmp_path):
        (tmp_path / "x").write_text("")
        with pytest.raises(CheckpointError, match="is a file"):
            model.save_pretrained(tmp_path / "x")

    def test_generation_settings_are_saved_unchanged(self, copy, tmp_path):
        text = '{"eos_token_id": [5, 6], "temperature": 0.6, "do_sample": true}'
        (copy / "generation_config.json").write_text(text)
        load(copy).save_pretrained(tmp_path / "again")
        assert (tmp_path / "again" / "generation_config.json").read_text() == text

    def test_save_pretrained_saves_tokenizer(self, model, tmp_path):
        class Tokenizer:
            def save_pretrained(self, directory):
                (directory / "tokenizer.json").write_text("{}")

        model.save_pretrained(tmp_path / "m", tokenizer=Tokenizer())
        assert (tmp_path / "m" / "tokenizer.json").is_file()

    def test_push_to_hub_uploads_a_saved_directory(self, model, monkeypatch):
        import huggingface_hub

        seen = {}

        class Api:
            def __init__(self, token):
                seen["token"] = token

            def create_repo(self, repo_id, private, exist_ok):
                return type("Repo", (), {"repo_id": repo_id})

            def upload_folder(self, repo_id, folder_path, revision, commit_message):
                seen["files"] = sorted(p.name for p in folder_path.iterdir())
                seen["card"] = (folder_path / "README.md").read_text()
                return f"https://hub/{repo_id}"

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        assert model.push_to_hub("me/tiny", token="t") == "https://hub/me/tiny"
        names = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
        assert seen["files"] == names
        assert "library_name: transformers\n" in seen["card"]
        adapted = model.apply_lora_to_layers(2)
        assert adapted.push_to_hub("me/tiny", token="t")
        assert "adapter_model.safetensors" in seen["files"]
        assert "library_name: peft\n" in seen["card"]

    def test_section_of_a_card_names_data_sets_of_the_hub(self, model, tmp_path):
        from ed_models.checkpoints.model_card import add_section, write_card

        write_card(tmp_path, model)
        add_section(tmp_path, "Training", ["- Method: `sft`"], datasets=["org/rows"])
        add_section(tmp_path, "Certificate", ["- 9 passed"])
        card = (tmp_path / "README.md").read_text()
        assert "datasets:\n- org/rows\n" in card
        assert card.index("## Training\n\n- Method: `sft`") < card.index("## Certificate")


def test_registered_family_provides_its_task_class():
    from ed_infra import registry

    assert registry.get_module(TaskType.CAUSAL_LM, "llama") is LlamaForCausalLM
