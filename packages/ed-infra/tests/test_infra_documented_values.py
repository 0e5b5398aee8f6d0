"""What EasyDeL's page of the base configuration documents about values and files acts.

The rest is in test_infra_documented_api.py.
"""

from __future__ import annotations

import ast
import json
import re
import types
import warnings
from pathlib import Path
from typing import Any, get_args, get_type_hints

import fsspec
import pytest
import transformers
from ed_infra import enums
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.documented import NOT_GIVEN, extract_commit_hash, set_attrs_smartly
from ed_infra.config.fields import FIELDS, ExecutionFields, canonical_field
from ed_infra.config.typed_dict import EasyDeLBaseConfigDict
from ed_infra.enums import EasyMethod
from ed_infra.errors import ConfigError
from ed_infra.sharding.axes import PartitionAxis
from ed_infra.specs import EasyDeLQuantizationConfig

proves = pytest.mark.proves
SIZES = {"hidden_size": 64, "num_attention_heads": 4}


class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
    model_type = "llama"


# --- values ---------------------------------------------------------------------------------------


@proves("add_basic_configurations")
@pytest.mark.parametrize("name", FIELDS)
def test_add_basic_configurations_sets_every_field_here_and_below(name: str):
    config, inner = EasyDeLBaseConfig(**SIZES), EasyDeLBaseConfig(**SIZES)
    config.text_config = inner
    value = OTHER.get(name, next_value(FIELDS[name].default))
    before = config.to_json_string(use_diff=False)
    config.add_basic_configurations(**{name: NOT_GIVEN})
    assert config.to_json_string(use_diff=False) == before
    config.add_basic_configurations(**{name: value})
    assert config.to_dict()[name] != FIELDS[name].default
    assert config.to_dict()[name] == inner.to_dict()[name]
    copied = EasyDeLBaseConfig(**SIZES)
    copied.read_basics_from_config(inner)
    assert copied == inner


def next_value(default: Any) -> Any:
    """A value of a field other than its default."""
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int) else 0.5


OTHER: dict[str, Any] = {
    "blocksize_q": 64,
    "blocksize_k": 64,
    "sharding_axis_dims": (8, 1, 1, 1, 1),
    "sharding_dcn_axis_dims": (2, 1, 1, 1, 1),
    "sharding_axis_names": ("a", "b", "c", "d", "e"),
    "partition_axis": {"head_axis": "sp"},
    "sharding_rules": [["x", ["tp"]]],
    "sequence_axis_name": "tp",
    "backend": "cpu",
    "platform": "pallas",
    "easy_method": "serve",
    "attn_mechanism": "flash",
    "mtp_head": "new",
    "decode_attn_mechanism": "vanilla",
    "attn_dtype": "bf16",
    "attn_softmax_dtype": "bf16",
    "kvdtype": "bf16",
    "flash_attention_backward_pass_impl": "xla",
    "mask_max_position_embeddings": 4,
    "freq_max_position_embeddings": 4,
    "gradient_checkpointing": "nothing_saveable",
    "gradient_checkpointing_targets": ["mlp_up"],
    "quantization_config": {"dtype": "int8"},
    "kv_cache_quantization_config": {"dtype": "int8"},
    "bits": 8,
    "kv_cache_sharding_sequence_axis_name": "tp",
    "moe_method": "dense_moe",
    "operation_configs": {"blockwise": {"block_q": 1}},
}


@proves("read_basics_from_config", "add_basic_configurations(**kwargs)")
def test_basics_are_checked_and_a_mesh_goes_along():
    config = EasyDeLBaseConfig(**SIZES)
    with pytest.raises(ConfigError, match="'atn_dtype'; did you mean 'attn_dtype'"):
        config.add_basic_configurations(atn_dtype="bf16")
    config.add_basic_configurations(rope_theta=7.0)
    assert config.rope_theta == 7.0
    mesh = EasyDeLBaseConfig.create_mesh((1, 1, 1, 8, 1))
    config.set_model_mesh(mesh)
    other = LlamaConfig()
    other.read_basics_from_config(config)
    assert other.mesh is mesh


@proves("EasyDeLBaseConfig(**kwargs)", "attention_mechanism", "gradient_checkpointing_policy")
@proves("use_hardware_abstraction")
def test_config_rejects_conflicting_aliases_and_unknown_keywords():
    with pytest.raises(ConfigError, match="another name of 'attn_mechanism'"):
        EasyDeLBaseConfig(attention_mechanism="flash", attn_mechanism="ring")
    with pytest.raises(ConfigError, match="in gradient_checkpointing"):
        EasyDeLBaseConfig(gradient_checkpointing_policy="nothing_savable")
    with pytest.raises(ConfigError, match=r"hardware_abstraction = .*bool"):
        EasyDeLBaseConfig(use_hardware_abstraction="maybe")
    with pytest.raises(ConfigError, match="did you mean 'hidden_size'"):
        EasyDeLBaseConfig(hiden_size=3)


@proves("UserWarning")
def test_a_quantized_and_sharded_cache_is_warned_of():
    both = {
        "use_sharded_kv_caching": True,
        "kv_cache_quantization_config": EasyDeLQuantizationConfig("int8"),
    }
    for cls in (EasyDeLBaseConfig, LlamaConfig):
        with pytest.warns(UserWarning, match="each shard of the cache") as caught:
            cls(**both)
        assert caught[0].filename == __file__, "the warning points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, value in both.items():
            EasyDeLBaseConfig(**{name: value})


@proves("EasyDeLQuantizationConfig")
def test_quantization_configurations_are_checked_and_kept(tmp_path: Any):
    config = LlamaConfig(quantization_config={"quantization_method": "8bit", "block_size": 32})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["easydel"]["quantization_config"]
    assert (saved["dtype"], saved["group_size"]) == ("int8", 32)
    assert LlamaConfig.from_pretrained(tmp_path) == config
    with pytest.raises(ConfigError, match="'nf5'; did you mean 'nf4'"):
        EasyDeLQuantizationConfig("nf5")
    with pytest.raises(ConfigError, match="'grup_size'; did you mean 'group_size'"):
        LlamaConfig(quantization_config={"grup_size": 3})


@proves("EasyDeLBaseConfigDict")
def test_the_typed_dict_is_the_table_of_fields():
    told = get_type_hints(EasyDeLBaseConfigDict, include_extras=False)
    table = get_type_hints(ExecutionFields, include_extras=False)
    assert told == table
    values: EasyDeLBaseConfigDict = {"attn_mechanism": "ring", "kvdtype": "bfloat16"}
    assert EasyDeLBaseConfig(**values).attn_mechanism == "ring"


@proves("EasyMethod", "EasyMethod.from_dict", "EasyMethod.from_json", "EasyMethod.replace")
@proves("EasyMethod.to_dict", "EasyMethod.to_json")
def test_easy_method_round_trips_and_rejects_unknown_fields():
    assert EasyMethod.EVAL == EasyMethod().EVAL == EasyMethod.SERVE == "serve"
    assert EasyDeLBaseConfig(easy_method=EasyMethod.CONVERT).to_dict()["easy_method"] == "convert"
    own = EasyMethod(TRAIN="fit")
    assert EasyMethod.from_dict(own.to_dict()) == EasyMethod.from_json(own.to_json()) == own
    assert own.replace(TRAIN="train") == EasyMethod()
    assert json.loads(own.to_json(indent=2)) == own.to_dict()
    assert "\n" in own.to_json(indent=2)
    with pytest.raises(ConfigError, match="'TRAINN'; did you mean 'TRAIN'"):
        own.replace(TRAINN="x")


@proves("EasyDeLBackends", "EasyDeLPlatforms", "AVAILABLE_ATTENTION_MECHANISMS")
@proves("AVAILABLE_MOE_METHODS")
def test_config_fields_accept_exactly_the_enum_values():
    for field, names in [
        ("backend", list(enums.EasyDeLBackends)),
        ("platform", list(enums.EasyDeLPlatforms)),
        ("attn_mechanism", get_args(enums.AVAILABLE_ATTENTION_MECHANISMS)),
        ("moe_method", get_args(enums.AVAILABLE_MOE_METHODS)),
    ]:
        for name in names:
            EasyDeLBaseConfig(**{field: name})
        with pytest.raises(ConfigError, match=f"did you mean '{names[0]}'"):
            EasyDeLBaseConfig(**{field: f"{names[0]}x"})


@proves("extract_commit_hash", "extract_commit_hash(resolved_file)")
@proves("extract_commit_hash(commit_hash)")
def test_extract_commit_hash_reads_snapshot_paths():
    commit = "0123456789abcdef0123456789abcdef01234567"
    path = f"/cache/models--a--b/snapshots/{commit}/model.safetensors"
    assert extract_commit_hash(path, None) == commit
    assert extract_commit_hash(path.replace("/", "\\"), None) == commit
    assert extract_commit_hash(path, "known") == "known"
    assert extract_commit_hash(None, None) is None
    assert extract_commit_hash(path.replace(commit, "main"), None) is None
    assert extract_commit_hash(path.replace("snapshots", "blobs"), None) is None


@proves("set_attrs_smartly", "set_attrs_smartly(attr_name)", "set_attrs_smartly(default)")
@proves("set_attrs_smartly(new_attr)")
def test_set_attrs_smartly_sets_missing_and_given_attributes():
    thing = types.SimpleNamespace(there=1)
    set_attrs_smartly(thing, "there", 2, NOT_GIVEN)
    set_attrs_smartly(thing, "missing", 12, NOT_GIVEN)
    set_attrs_smartly(thing, "given", 12, None)
    assert vars(thing) == {"there": 1, "missing": 12, "given": None}
    config = EasyDeLBaseConfig()
    set_attrs_smartly(config, "attention_mechanism", "vanilla", "flash")
    assert config.attn_mechanism == "flash_attn2"


# --- files ----------------------------------------------------------------------------------------


@proves("attach_custom_arguments", "save_pretrained", "to_dict", "to_diff_dict", "from_pretrained")
@proves("from_pretrained(pretrained_model_name_or_path)", "from_pretrained(subfolder)")
@proves("save_pretrained(save_directory)", "to_json_file", "to_json_file(json_file_path)")
@proves("to_json_file(use_diff)")
@pytest.mark.parametrize("remote", [False, True])
def test_config_files_round_trip_locally_and_remotely(remote: bool, tmp_path: Any):
    place = "memory://test_infra_documented_api" if remote else str(tmp_path)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, attn_mechanism="ring")
    config.attach_custom_arguments(my_custom_param="value", another_param=42)
    config.save_pretrained(f"{place}/inner")
    for address in (f"{place}/inner", f"{place}/inner/config.json"):
        assert LlamaConfig.from_pretrained(address) == config
    read = LlamaConfig.from_pretrained(place, subfolder="inner")
    assert (read.my_custom_param, read.another_param) == ("value", 42)
    config.to_json_file(f"{place}/diff.json")
    config.to_json_file(f"{place}/full.json", use_diff=False)

    def content(name: str) -> dict:
        with fsspec.open(f"{place}/{name}", "rt") as file:
            return json.load(file)

    assert content("diff.json") == content("inner/config.json")
    assert content("full.json")["sharding_axis_dims"] == [1, -1, 1, 1, 1]
    assert LlamaConfig.from_dict(content("full.json")) == config
    diff = config.to_diff_dict()
    assert diff["easydel"] == {"attn_mechanism": "ring"} and "sharding_axis_dims" not in diff
    assert config.to_dict()["sharding_axis_dims"] == [1, -1, 1, 1, 1]


@proves("from_pretrained(cache_dir)", "from_pretrained(revision)")
@proves("from_pretrained(local_files_only)", "from_pretrained(force_download)")
def test_from_pretrained_reads_revisions_from_hub_cache(tmp_path: Any):
    def put(revision: str, commit: str, **fields: Any) -> None:
        folder = tmp_path / "models--someone--tiny"
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        LlamaConfig(**fields).save_pretrained(snapshot)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(commit)

    put("main", "1" * 40, vocab_size=11)
    put("v2", "2" * 40, vocab_size=22)
    load = LlamaConfig.from_pretrained
    where = {"cache_dir": tmp_path, "local_files_only": True}
    assert load("someone/tiny", **where).vocab_size == 11
    assert load("someone/tiny", **where, revision="v2").vocab_size == 22
    with pytest.raises(OSError, match="couldn't find them in the cached files"):
        load("someone/tiny", local_files_only=True)
    with pytest.raises(OSError, match="force_download"):  # there is no network
        load("someone/tiny", cache_dir=tmp_path, force_download=True)


@proves("from_pretrained(token)")
def test_the_token_reaches_the_hub(monkeypatch: pytest.MonkeyPatch):
    seen = {}

    def cached_file(*args: Any, **keywords: Any) -> None:
        seen.update(keywords)
        raise OSError("someone/tiny is not there")

    monkeypatch.setattr("transformers.configuration_utils.cached_file", cached_file)
    with pytest.raises(OSError, match="someone/tiny"):
        LlamaConfig.from_pretrained("someone/tiny", token="secret")
    assert seen["token"] == "secret"


@proves("from_pretrained(return_unused_kwargs)", "from_pretrained(**kwargs)")
@proves("from_pretrained(proxies)", "from_pretrained(resume_download)")
def test_from_pretrained_validates_keywords(tmp_path: Any, caplog: pytest.LogCaptureFixture):
    LlamaConfig().save_pretrained(tmp_path)
    config, unused = LlamaConfig.from_pretrained(
        tmp_path, output_attentions=True, foo=False, return_unused_kwargs=True
    )
    assert config.output_attentions is True and unused == {"foo": False}
    with pytest.raises(ConfigError, match="no field 'foo'"):
        LlamaConfig.from_pretrained(tmp_path, foo=False)
    with pytest.raises(ConfigError, match="HTTPS_PROXY"):
        LlamaConfig.from_pretrained(tmp_path, proxies={"https": "somewhere"})
    with caplog.at_level("WARNING", logger="easydel"):
        LlamaConfig.from_pretrained(tmp_path, resume_download=True)
    assert "always resumed" in caplog.text


@proves("save_pretrained(push_to_hub)")
def test_save_pretrained_pushes_local_directory_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    pushed = []
    monkeypatch.setattr(
        transformers.PretrainedConfig,
        "_upload_modified_files",
        lambda self, folder, repo, *rest, **kw: pushed.append((str(folder), repo)),
    )
    hub = types.SimpleNamespace(
        create_repo=lambda repo_id, **keywords: types.SimpleNamespace(repo_id=repo_id)
    )
    monkeypatch.setattr("transformers.configuration_utils.hf_api", lambda *a, **k: hub)
    LlamaConfig().save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id="me/mine")
    assert pushed == [(str(tmp_path / "mine"), "me/mine")]
    with pytest.raises(ConfigError, match="push_to_hub needs a local directory"):
        LlamaConfig().save_pretrained("memory://x", push_to_hub=True)


#: Documented default of the constructor -> the default here, listed in docs/migrate/easydel.md.
OTHER_DEFAULTS = {
    "attn_mechanism": "auto",
    "attn_dtype": None,
    "blocksize_q": None,
    "blocksize_k": None,
    "scan_attention_layers": True,
}


def test_defaults_of_the_constructor_are_documented_or_listed():
    root = Path(__file__).parents[3]
    page = (root / "tests/guides/documents/002.txt").read_text("utf-8")
    signature = page[page.index("base_config.EasyDeLBaseConfig(") : page.index("**kwargs)[source]")]
    axes = signature[signature.index("PartitionAxis = PartitionAxis(") :]
    axes = axes[axes.index("= PartitionAxis(") + 2 : axes.index("), use_sharded_kv") + 1]
    documented = dict(re.findall(r"(\w+): [^=]+? = (\(.+?\)|<class .+?>|[^,)]+)", signature))
    config, compared = EasyDeLBaseConfig(), 0
    for name, text in documented.items():
        if canonical_field(name) not in FIELDS or name == "partition_axis":
            continue
        value = getattr(config, name)
        compared += 1
        if name in OTHER_DEFAULTS:
            assert value == OTHER_DEFAULTS[name]
            assert f"`{name}`" in (root / "docs/migrate/easydel.md").read_text("utf-8")
        elif "jax.numpy" in text:
            assert value in text
        elif text == "EasyDeLGradientCheckPointers.NONE":
            assert value == ""
        else:
            assert value == ast.literal_eval(text), name
    assert compared > 40
    assert config.partition_axis == eval(axes, {"PartitionAxis": PartitionAxis})
