"""Checkpoints that are damaged or contradict themselves: one error, before a value is read."""

import json
import os
import pickle
import shutil
import struct
import zipfile
from contextlib import suppress

import jax
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError, RegistryError
from ed_infra.logging import forget_said
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.checkpoints import filling, hub, loading
from ed_models.checkpoints.pickled_files import open_tensors, read_pickled
from ed_models.checkpoints.tokenizers import load_tokenizer
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx
from safetensors.numpy import load_file

from tests.conformance.cases import subjects

ONE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM.create(LlamaConfig(**SHAPE, **ONE), seed=1)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "model"
    model.save_pretrained(directory, max_shard_size="10KB")
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.fixture
def no_values(monkeypatch):
    """Loading fails the test if a parameter is made."""

    def made(*_):
        raise AssertionError("a parameter was made before the error")

    monkeypatch.setattr(filling, "_build_array", made)


def load(directory, **options):
    return AutoEasyDeLModelForCausalLM.from_pretrained(directory, **{**ONE, **options})


def equal(a, b):
    return all(
        np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(nnx.state(a)), jax.tree.leaves(nnx.state(b)), strict=True)
    )


def edit(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


@pytest.mark.usefixtures("no_values")
class TestShards:
    def shard(self, copy, number=2):
        return sorted(copy.glob("*.safetensors"))[number]

    def test_truncated_shard_raises_checkpoint_error(self, copy):
        file = self.shard(copy)
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 1)
        with pytest.raises(CheckpointError, match=rf"{file.name}: tensor .* cut short"):
            load(copy)

    def test_shard_truncated_in_header_raises_checkpoint_error(self, copy):
        file = self.shard(copy)
        os.truncate(file, 5)
        with pytest.raises(CheckpointError, match=r"not a whole safetensors file \(5 bytes\)"):
            load(copy)

    def test_corrupt_shard_header_raises_checkpoint_error(self, copy):
        file = self.shard(copy)
        data = bytearray(file.read_bytes())
        data[8:20] = b"\xff" * 12
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="header is damaged"):
            load(copy)

    def test_a_header_that_claims_more_than_the_file(self, copy):
        file = self.shard(copy)
        file.write_bytes(struct.pack("<Q", 2**60) + b"{}")
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            load(copy)

    def test_missing_shard_raises_checkpoint_error(self, copy):
        self.shard(copy).unlink()
        with pytest.raises(CheckpointError, match=r"of which 1 are not there: model-00003"):
            load(copy)

    def test_an_index_that_names_absent_tensors(self, copy):
        index = copy / "model.safetensors.index.json"
        table = json.loads(index.read_text())["weight_map"]
        table["model.norm.weight"] = next(f for f in table.values() if "00001" in f)
        edit(index, weight_map=table)
        with pytest.raises(CheckpointError, match="not in the files that it names for them"):
            load(copy)

    @pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors"])
    def test_an_index_that_points_elsewhere(self, copy, name):
        index = copy / "model.safetensors.index.json"
        edit(index, weight_map={"model.norm.weight": name})
        with pytest.raises(CheckpointError, match="names files outside its folder"):
            load(copy)

    def test_oversized_index_and_tokenizer_are_rejected_before_reading(self, copy):
        for name, why in (
            ("model.safetensors.index.json", "that is no index"),
            ("tokenizer.json", "that is no tokenizer"),
        ):
            with (copy / name).open("wb") as stream:
                stream.truncate(2**28 + 1)
            with pytest.raises(CheckpointError, match=why):
                load(copy)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": "ab"}'])
    def test_broken_index_raises_checkpoint_error(self, copy, text):
        (copy / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
            load(copy)

    def test_everything_that_does_not_fit_is_in_one_error(self, copy):
        edit(copy / "config.json", intermediate_size=20, num_hidden_layers=3)
        with pytest.raises(CheckpointError) as error:
            load(copy)
        text = str(error.value)
        assert "missing (9):" in text and "of another shape (6):" in text
        assert "mlp.up_proj.weight: the file has [24, 16], the model [20, 16]" in text


DEEP = "[" * 200_000


@pytest.mark.usefixtures("no_values")
class TestNesting:
    """JSON that is nested deeper than the parser's stack."""

    def test_deeply_nested_safetensors_header_raises_checkpoint_error(self, copy):
        file = sorted(copy.glob("*.safetensors"))[0]
        header = ('{"a": ' + DEEP).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(
            CheckpointError, match=f"{file.name}: the safetensors header is damaged"
        ):
            load(copy)

    @pytest.mark.parametrize(
        "name", ["config.json", "tokenizer.json", "model.safetensors.index.json"]
    )
    def test_deeply_nested_settings_raise_checkpoint_error(self, copy, name):
        (copy / name).write_text('{"model": ' + DEEP)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load(copy)

    def test_deeply_nested_tokenizer_raises_checkpoint_error(self, copy):
        (copy / "tokenizer.json").write_text('{"model": ' + DEEP)
        (copy / "tokenizer_config.json").write_text('{"tokenizer_class": ' + DEEP)
        with pytest.raises(CheckpointError, match="no tokenizer could be loaded"):
            load_tokenizer(str(copy))


@pytest.mark.usefixtures("no_values")
class TestConfigurations:
    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value"),
            ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and must be at least 1"),
            ({"vocab_size": -1}, "vocab_size is -1, and must be at least 1"),
            ({"num_attention_heads": 0}, "describes no model: "),
            ({"hidden_size": 15}, "hidden size .15. is not a multiple"),
            ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
            ({"layer_types": ["full_attention"]}, "`num_hidden_layers` .2. must be equal"),
            ({"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys"),
            ({"id2label": {"0": "a"}, "num_labels": 3}, "num_labels is 3, and id2label has 1"),
            ({"easydel": {"attn_mechansim": "x"}}, "unknown key 'attn_mechansim'"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan must be a finite number"),
            ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf must be a finite number"),
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
                r"rope_parameters\.rope_theta = nan must be a finite number",
            ),
            ({"num_hidden_layers": 1_000_000}, "at most 10000 is allowed"),
            ({"hidden_size": 10**15}, "at most 1048576 is allowed"),
            ({"vocab_size": 10**12}, "at most 67108864 is allowed"),
        ],
    )
    def test_contradictory_config_raises_checkpoint_error(self, copy, changes, why):
        edit(copy / "config.json", **changes)
        with pytest.raises(CheckpointError, match=why) as error:
            load(copy)
        assert str(copy / "config.json") in str(error.value)

    def test_more_layers_than_tensors_are_refused_before_the_model_is_built(
        self, copy, monkeypatch
    ):
        edit(copy / "config.json", num_hidden_layers=9_000)
        monkeypatch.setattr(loading, "_structure", lambda *_: pytest.fail("the model is built"))
        with pytest.raises(CheckpointError, match=r"num_hidden_layers is 9000, .* only 21 tensors"):
            load(copy)

    def test_values_that_differ_by_layer_are_no_contradiction(self, tmp_path):
        subject = subjects("gemma4_text")[0]
        config = {"model_type": "gemma4_text", **subject.fields}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert hub.read_config(tmp_path).hidden_size == subject.fields["hidden_size"]

    def test_unknown_activation_raises_config_error(self, copy):
        edit(copy / "config.json", hidden_act="silly")
        with pytest.raises(ConfigError, match="'silly'; did you mean 'silu'"):
            load(copy)

    def test_a_class_of_another_type(self, copy):
        # Mistral has the same tensors, and a window that Llama's class would pass over.
        edit(copy / "config.json", model_type="mistral")
        with pytest.raises(CheckpointError, match="of type 'mistral', and LlamaForCausalLM is of"):
            LlamaForCausalLM.from_pretrained(copy, **ONE)

    @pytest.mark.parametrize("name", ["qwen33", "lamma"])
    def test_unknown_model_type_error_suggests_next_steps(self, copy, name):
        edit(copy / "config.json", model_type=name)
        with pytest.raises(RegistryError, match=r"did you mean '(qwen3|llama)'") as error:
            load(copy)
        assert "docs/adding_models.md" in str(error.value) and "near it: " in str(error.value)

    @pytest.mark.parametrize("text", ["[1]", '"llama"', '{"model_type": 3}', "[" * 10**5])
    def test_config_that_is_no_json_object_raises_checkpoint_error(self, copy, text):
        (copy / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"is not a JSON object|has no .model_type"):
            load(copy)

    def test_oversized_config_is_rejected_before_reading(self, copy):
        with (copy / "config.json").open("wb") as stream:
            stream.truncate(2**25)
        with pytest.raises(CheckpointError, match="that is no settings file"):
            load(copy)


class TestTokenizers:
    def tokenizer(self, directory, vocab, added=()):
        content = {"model": {"type": "BPE", "vocab": vocab}}
        content["added_tokens"] = [{"id": i, "content": f"<{i}>"} for i in added]
        (directory / "tokenizer.json").write_text(json.dumps(content))

    @pytest.mark.usefixtures("no_values")
    @pytest.mark.parametrize("vocab", [{"a": 0, "b": 64}, [["a", 0.0]] * 65])
    def test_tokenizer_larger_than_vocabulary_raises_checkpoint_error(self, copy, vocab):
        self.tokenizer(copy, vocab)
        with pytest.raises(CheckpointError, match="token ids up to 64, and the model a vocab"):
            load(copy)

    @pytest.mark.usefixtures("no_values")
    def test_damaged_tokenizer_raises_checkpoint_error(self, copy):
        (copy / "tokenizer.json").write_text("{}")
        with pytest.raises(CheckpointError, match="is no tokenizer"):
            load(copy)

    def test_added_tokens_beyond_vocabulary_log_warning(self, copy, caplog):
        forget_said()
        self.tokenizer(copy, {"a": 0}, added=(63, 64))
        with caplog.at_level("WARNING", "easydel"):
            load(copy)
        assert "added tokens [64] are beyond the model's vocabulary of 64" in caplog.text


def to_pickles(directory, *, shards=False):
    """Rewrite a checkpoint's weights as torch saves them."""
    torch = pytest.importorskip("torch")
    content = {}
    for file in directory.glob("*.safetensors"):
        content |= {n: torch.tensor(v) for n, v in load_file(file).items()}
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    if not shards:
        torch.save(content, directory / "pytorch_model.bin")
        return
    names = sorted(content)
    files = {
        "pytorch_model-00001-of-00002.bin": names[::2],
        "pytorch_model-00002-of-00002.bin": names[1::2],
    }
    for file, own in files.items():
        torch.save({n: content[n] for n in own}, directory / file)
    table = {n: file for file, own in files.items() for n in own}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))


@pytest.mark.torch
class TestPickles:
    def test_pickles_are_rejected_without_allow_pickle(self, copy):
        to_pickles(copy)
        with pytest.raises(CheckpointError, match="allow_pickle=True"):
            load(copy)

    @pytest.mark.parametrize("shards", [False, True])
    def test_pickles_load_with_allow_pickle(self, model, copy, shards):
        to_pickles(copy, shards=shards)
        assert equal(load(copy, allow_pickle=True), model)
        os.remove(next(copy.glob("pytorch_model*.bin")))
        with pytest.raises(CheckpointError, match=r"are not there|no \*.safetensors"):
            load(copy, allow_pickle=True)

    def test_safetensors_take_precedence_over_pickles(self, model, copy):
        (copy / "pytorch_model.bin").write_bytes(b"never read")
        assert equal(load(copy, allow_pickle=True), model)

    def test_pickle_reader_supports_every_dtype_and_shape(self, tmp_path):
        torch = pytest.importorskip("torch")
        content = {
            "f32": torch.arange(6.0).reshape(2, 3),
            "bf16": torch.arange(6.0).bfloat16(),
            "f16": torch.arange(6.0).half().reshape(3, 1, 2),
            "fp8": torch.arange(6.0).to(torch.float8_e4m3fn),
            "i64": torch.tensor(7),
            "bool": torch.tensor([True, False]),
            "u8": torch.zeros(0, 3, dtype=torch.uint8),
            "rows of a whole": torch.arange(12.0).reshape(4, 3)[1:3],
            "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        }
        torch.save(content, tmp_path / "pytorch_model.bin")
        files = open_tensors(tmp_path, allow_pickle=True)
        assert set(files) == set(content)
        for name, value in content.items():
            want = value.detach().float().numpy()
            np.testing.assert_array_equal(files.read(name).astype(np.float32), want, err_msg=name)
            assert files[name].shape == tuple(value.shape)
        np.testing.assert_array_equal(files.read("f32", (slice(1, 2),)), [[3, 4, 5]])

    def test_a_module_state_with_metadata(self, tmp_path):
        torch = pytest.importorskip("torch")
        torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "x.bin")
        assert {n: e.shape for n, e in read_pickled(tmp_path / "x.bin").items()} == {
            "weight": (2, 3),
            "bias": (2,),
        }

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (lambda torch: {"state_dict": {"a": torch.ones(2)}}, "'state_dict' is a dict, not a"),
            (lambda torch: [torch.ones(2)], "holds a list, not tensors by name"),
            (lambda torch: {"a": 3}, "'a' is a int, not a tensor"),
            (lambda torch: {"a": torch.ones(2, 3).T}, "does not lie in one piece"),
            (lambda torch: {"a": torch.nn.Linear(2, 2)}, "refers to torch.nn.modules.linear"),
        ],
    )
    def test_pickle_without_tensor_mapping_raises_checkpoint_error(self, tmp_path, content, why):
        torch = pytest.importorskip("torch")
        torch.save(content(torch), tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=why):
            open_tensors(tmp_path, allow_pickle=True)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def zipped(path, data, **files):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for name, value in files.items():
            archive.writestr(f"archive/{name}", value)


class TestHostilePickles:
    def test_hostile_pickle_does_not_run_code(self, tmp_path):
        target = tmp_path / "ran"
        file = tmp_path / "pytorch_model.bin"
        zipped(file, pickle.dumps({"a": Evil(target)}))
        with pytest.raises(CheckpointError, match=r"refers to (posix|nt)\.mkdir, .* not run"):
            open_tensors(tmp_path, allow_pickle=True)
        file.write_bytes(pickle.dumps(Evil(target)))  # the format before torch 1.6
        with pytest.raises(CheckpointError, match=r"is no file of torch >= 1\.6"):
            open_tensors(tmp_path, allow_pickle=True)
        assert not target.exists()

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"garbage",
            b"\x80\x02}.trailing"[:2],
            b"\x80\x04\x96" + struct.pack("<Q", 2**62) + b".",  # a bytearray of 4 exabytes
            b"\x80\x02}r" + struct.pack("<I", 2**31) + b".",  # a far place of the memo
            b"\x80\x02K\x01Q.",  # a reference to a storage that is a number
        ],
    )
    def test_garbage_pickle_raises_only_checkpoint_error(self, tmp_path, data):
        zipped(tmp_path / "pytorch_model.bin", data)
        with suppress(CheckpointError):
            assert not open_tensors(tmp_path, allow_pickle=True)  # the far place is harmless

    def test_archive_not_written_by_torch_raises_checkpoint_error(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
            archive.writestr("word/document.xml", "x")
        with pytest.raises(CheckpointError, match="none that torch wrote"):
            open_tensors(tmp_path, allow_pickle=True)

    @pytest.mark.torch
    def test_truncated_and_compressed_pickles_raise_checkpoint_error(self, tmp_path):
        torch = pytest.importorskip("torch")
        file = tmp_path / "pytorch_model.bin"
        torch.save({"a": torch.ones(400)}, file)
        whole = file.read_bytes()
        with zipfile.ZipFile(file) as archive:
            members = {n: archive.read(n) for n in archive.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        with pytest.raises(CheckpointError, match="is compressed"):
            open_tensors(tmp_path, allow_pickle=True)
        file.write_bytes(whole[:900])
        with pytest.raises(CheckpointError, match="cut short"):
            open_tensors(tmp_path, allow_pickle=True)


class TestWhere:
    def test_variant_selects_weight_file(self, model, tmp_path):
        model.save_pretrained(tmp_path / "m", dtype="float16")
        file = tmp_path / "m/model.safetensors"
        file.rename(tmp_path / "m/model.fp16.safetensors")
        model.save_pretrained(tmp_path / "whole")
        shutil.copy(tmp_path / "whole/model.safetensors", file)
        assert equal(load(tmp_path / "m"), model)
        half = load(tmp_path / "m", variant="fp16")
        assert not equal(half, model)
        with pytest.raises(CheckpointError, match=r"no weights of variant 'bf16' .neither model"):
            load(tmp_path / "m", variant="bf16")

    def test_variant_selects_sharded_weight_files(self, model, copy):
        index = copy / "model.safetensors.index.json"
        table = json.loads(index.read_text())["weight_map"]
        for name in set(table.values()):
            (copy / name).rename(copy / name.replace("model-", "model.fp16-"))
        renamed = {n: f.replace("model-", "model.fp16-") for n, f in table.items()}
        (copy / "model.safetensors.index.fp16.json").write_text(json.dumps({"weight_map": renamed}))
        index.unlink()
        assert equal(load(copy, variant="fp16"), model)

    def test_subfolder_selects_model_directory(self, model, saved, tmp_path):
        shutil.copytree(saved, tmp_path / "all/inner")
        assert equal(load(tmp_path / "all", subfolder="inner"), model)
        with pytest.raises(CheckpointError, match="no subfolder 'iner'; did you mean 'inner'"):
            load(tmp_path / "all", subfolder="iner")

    def test_hub_download_requests_only_needed_files(self, saved, tmp_path, monkeypatch):
        """A hub that records requests; tests have no network."""
        asked = []

        def snapshot(name, **options):
            asked.append((name, options))
            return str(tmp_path / "snapshot")

        shutil.copytree(saved, tmp_path / "snapshot/deep/inner")
        monkeypatch.setattr(hub, "snapshot_download", snapshot)
        load("org/name", subfolder="deep/inner", revision="v1", token="t", local_files_only=True)
        [(name, options)] = asked
        assert (name, options["revision"], options["token"]) == ("org/name", "v1", "t")
        assert options["local_files_only"] is True
        assert "deep/inner/*.safetensors" in options["allow_patterns"]
        assert "deep/inner/*.bin" in options["ignore_patterns"]
        for file in (tmp_path / "snapshot/deep/inner").glob("*.safetensors"):
            file.unlink()
        (tmp_path / "snapshot/deep/inner/modules.json").write_text("[]")
        with pytest.raises(CheckpointError):
            load("org/name", subfolder="deep/inner", allow_pickle=True)
        patterns = [options["allow_patterns"] for _, options in asked[-2:]]
        modules = ["_Pooling/config.json", "_Dense/config.json"]
        modules += ["_Dense/*.safetensors", "_Dense/pytorch_model.bin"]
        assert patterns[0] == [f"deep/inner/*{name}" for name in modules]
        assert patterns[1] == ["deep/inner/pytorch_model*.bin"]
