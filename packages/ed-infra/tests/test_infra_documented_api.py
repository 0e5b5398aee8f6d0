"""What EasyDeL's page of the base configuration documents: every method, keyword and class acts.

`proves` names what a test shows; docs/config_reference.md is made from it. Execution fields whose
effect needs a model are shown by packages/ed-models/tests/test_models_knobs.py.
"""

from __future__ import annotations

import json
import types
import warnings
from typing import Any, get_args, get_type_hints

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from ed_infra import enums
from ed_infra.axes import PartitionAxis
from ed_infra.caches import ModuleCaches
from ed_infra.config import EasyDeLBaseConfig, EasyDeLBaseConfigDict
from ed_infra.config_attributes import NOT_GIVEN, extract_commit_hash, set_attrs_smartly
from ed_infra.enums import EasyMethod
from ed_infra.errors import ConfigError, MeshError
from ed_infra.fields import FIELDS, ExecutionFields
from ed_infra.mesh import create_mesh
from ed_infra.specs import AttnMaskDetail, EasyDeLQuantizationConfig
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

proves = pytest.mark.proves
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}


class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
    model_type = "llama"


# --- meshes ---------------------------------------------------------------------------------------


@proves("create_mesh", "create_mesh(sharding_axis_dims)", "create_mesh(sharding_axis_names)")
@proves("create_mesh(axis_dims)", "create_mesh(axis_names)")
@proves("create_mesh(backend)")
def test_both_call_forms_of_create_mesh():
    names = ("a", "b")
    new = EasyDeLBaseConfig.create_mesh(sharding_axis_dims=(2, -1), sharding_axis_names=names)
    old = EasyDeLBaseConfig(**SIZES).create_mesh(axis_dims=(2, -1), axis_names=names, backend="cpu")
    assert new == old
    assert dict(new.shape) == {"a": 2, "b": 4}
    assert dict(EasyDeLBaseConfig.create_mesh().shape)["fsdp"] == 8
    with pytest.raises(ConfigError, match="keep one"):
        EasyDeLBaseConfig.create_mesh(sharding_axis_dims=(8, 1), axis_dims=(8, 1))
    with pytest.raises(MeshError, match="backend 'tpu' is not available here"):
        EasyDeLBaseConfig.create_mesh(backend="tpu")


def device(number: int, process: int, slice_index: int | None, x: int = 0) -> Any:
    """What a mesh reads of a device."""
    return types.SimpleNamespace(
        id=number,
        process_index=process,
        slice_index=slice_index,
        platform="cpu" if slice_index is None else "gpu",
        device_kind="fake",
        coords=(x, 0, 0),
        core_on_chip=0,
        client=None,
    )


@proves("create_mesh(sharding_dcn_axis_dims)", "sharding_dcn_axis_dims")
@proves("create_mesh(process_is_granule)", "create_mesh(should_sort_granules_by_key)")
def test_slices_and_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ed_infra.mesh.Mesh", lambda array, names, axis_types: array)
    # Two slices of two processes each, two devices a process; the second slice comes first.
    devices = [device(i, i // 2, 1 - i // 4) for i in range(8)]

    def ids(dims: tuple[int, int], dcn: tuple[int, int], **how: bool) -> list[list[int]]:
        array = create_mesh(dims, ("a", "b"), dcn, devices, **how)
        return [[d.id for d in row] for row in np.asarray(array)]

    assert ids((1, 4), (2, 1)) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    unsorted = ids((1, 4), (2, 1), should_sort_granules_by_key=False)
    assert unsorted == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(MeshError, match="take 4 slices, but there are 2"):
        ids((1, 2), (4, 1))
    assert ids((1, 2), (4, 1), process_is_granule=True) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    config = EasyDeLBaseConfig(
        **SIZES, sharding_axis_dims=(1, -1, 1, 1, 1), sharding_dcn_axis_dims=(2, 1, 1, 1, 1)
    )
    monkeypatch.undo()
    assert dict(config.mesh.shape) == {"dp": 2, "fsdp": 4, "ep": 1, "tp": 1, "sp": 1}


@proves("create_mesh(allow_split_physical_axes)")
def test_splitting_the_torus(monkeypatch: pytest.MonkeyPatch):
    def torus(shape: Any, devices: Any, *, allow_split_physical_axes: bool) -> Any:
        if not allow_split_physical_axes:
            raise NotImplementedError("would split")
        return np.asarray(devices, dtype=object).reshape(shape)

    monkeypatch.setattr("ed_infra.mesh.mesh_utils.create_device_mesh", torus)
    monkeypatch.setattr("ed_infra.mesh.Mesh", lambda array, names, axis_types: array)
    devices = [device(i, 0, 0, i) for i in range(4)]
    for one in devices:
        one.platform = "tpu"
    assert create_mesh((2, 2), ("a", "b"), devices=devices).shape == (2, 2)
    with pytest.raises(MeshError, match="allow_split_physical_axes=True"):
        create_mesh((2, 2), ("a", "b"), devices=devices, allow_split_physical_axes=False)


@proves("mesh", "set_model_mesh", "jax_mesh", "get_axis_dims", "get_axis_names")
def test_the_mesh_of_a_configuration():
    config = EasyDeLBaseConfig(**SIZES, sharding_axis_dims=(2, 2, 1, 2, 1))
    assert dict(config.mesh.shape) == {"dp": 2, "fsdp": 2, "ep": 1, "tp": 2, "sp": 1}
    assert config.mesh is config.mesh is config.jax_mesh()
    made = EasyDeLBaseConfig.create_mesh(config.get_axis_dims(), config.get_axis_names())
    assert made == config.mesh
    other = EasyDeLBaseConfig.create_mesh((1, 1, 1, 8, 1))
    config.set_model_mesh(other)
    assert config.mesh is config.jax_mesh() is other
    config.seal()
    with pytest.raises(ConfigError, match=r"config\.replace\(\)"):
        config.set_model_mesh(made)


@proves("expert_mesh", "auto_expert_mesh", "expert_abstract_mesh")
@proves("fsdp_is_ep_bound", "sp_is_ep_bound")
@pytest.mark.parametrize(
    ("fsdp", "sp", "shape"),
    [
        (True, True, (1, 8, 1)),
        (False, True, (2, 4, 1)),
        (True, False, (2, 4, 1)),
        (False, False, (4, 2, 1)),
    ],
)
def test_expert_meshes(fsdp: bool, sp: bool, shape: tuple[int, ...]):
    config = EasyDeLBaseConfig(
        **SIZES,
        sharding_axis_dims=(1, 2, 2, 1, 2),
        fsdp_is_ep_bound=fsdp,
        sp_is_ep_bound=sp,
    )
    mesh = config.expert_mesh
    assert tuple(mesh.shape.items()) == tuple(zip(("dp", "ep", "tp"), shape, strict=True))
    assert mesh.axis_types == (AxisType.Explicit,) * 3
    assert config.auto_expert_mesh.axis_types == (AxisType.Auto,) * 3
    assert (config.auto_expert_mesh.devices == mesh.devices).all()
    assert config.expert_abstract_mesh.shape == mesh.shape
    assert not hasattr(config.expert_abstract_mesh, "devices_indices_map")


@proves("partition_manager", "PartitionManager.resolve", "PartitionAxis")
def test_the_call_of_the_page():
    config = EasyDeLBaseConfig(**SIZES)
    resolve = config.partition_manager.resolve
    assert resolve(axes=["dp", "tp"], mode="train", shape=(8, 1024)) == PartitionSpec("dp", "tp")
    moved = config.replace(partition_axis=PartitionAxis(head_axis="ep"))
    batch = ("fsdp", "dp")
    assert moved.partition_manager.resolve(["batch", "heads"]) == PartitionSpec(batch, "ep")
    assert resolve(["batch", "sequence"], mode="decode") == PartitionSpec(batch, None)


# --- positions ------------------------------------------------------------------------------------


@proves("get_basic_frequencies", "get_basic_frequencies(base)", "ModuleCaches")
@proves("get_basic_frequencies(head_size)", "get_basic_frequencies(rotary_dim)")
@proves("get_basic_frequencies(max_position_embeddings)")
@proves("get_basic_inv_frequencies", "get_basic_inv_frequencies(head_size)")
@proves("get_basic_inv_frequencies(rotary_dim)", "get_basic_inv_frequencies(base)")
@proves("get_basic_inv_frequencies(partial_rotary_factor)", "granted_freq_max_position_embedding")
@proves("hidden_size", "num_attention_heads")
def test_frequencies():
    config = EasyDeLBaseConfig(**SIZES, rope_theta=100.0)
    table = config.get_basic_frequencies()
    assert isinstance(table, ModuleCaches) and table.shape == (32, 16)
    assert len(table.sharding.device_set) == config.mesh.size == 8
    assert config.get_basic_frequencies(8).shape == (32, 8)
    assert config.replace(hidden_size=128).get_basic_frequencies().shape == (32, 32)
    assert config.replace(num_attention_heads=8).get_basic_frequencies().shape == (32, 8)
    assert config.get_basic_frequencies(8, rotary_dim=4).shape == (32, 4)
    assert config.get_basic_frequencies(max_position_embeddings=5).shape == (5, 16)
    assert not np.allclose(config.get_basic_frequencies(base=7.0), table)
    inverse = config.get_basic_inv_frequencies()
    np.testing.assert_allclose(np.cos(np.asarray(inverse) * 3), table[3, :8], rtol=1e-6)
    assert config.get_basic_inv_frequencies(head_size=8).shape == (4,)
    assert config.get_basic_inv_frequencies(rotary_dim=4).shape == (2,)
    assert config.get_basic_inv_frequencies(partial_rotary_factor=0.5).shape == (4,)
    assert config.get_basic_inv_frequencies(base=9.0)[1] != inverse[1]
    longer = config.replace(freq_max_position_embeddings=64)
    assert longer.get_basic_frequencies().shape == (longer.granted_freq_max_position_embedding, 16)

    class Module(nnx.Module):
        def __init__(self) -> None:
            self.frequencies = nnx.data(table)

    assert not jax.tree.leaves(nnx.state(Module(), nnx.Param)), "no parameter"
    assert len(jax.tree.leaves(nnx.state(Module()))) == 1


@proves("get_basic_rope", "get_basic_rope(dtype)", "get_basic_rope(head_size)")
@proves("get_basic_rope(rotary_dim)", "get_basic_rope(is_neox_style)", "get_basic_rope(base)")
@proves("get_basic_rope(max_position_embeddings)", "rope_theta", "rope_scaling")
@proves("max_position_embeddings")
def test_both_forms_of_a_rotary_embedding():
    config = EasyDeLBaseConfig(**SIZES)
    sin, cos = config.get_basic_rope(
        dtype=jnp.bfloat16, head_size=16, rotary_dim=8, max_position_embeddings=7
    )
    assert sin.shape == cos.shape == (7, 4)
    assert sin.dtype == jnp.bfloat16
    assert next(iter(config.get_basic_rope())).shape[0] == config.max_position_embeddings
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 4, 16)), jnp.float32)
    positions = jnp.arange(5)[None]

    def turned(config: EasyDeLBaseConfig = config, **how: Any) -> np.ndarray:
        rope = config.get_basic_rope(jnp.float32, 16, **how)
        return np.asarray(rope(q, q[:, :, :2], positions)[0])

    plain = turned()
    half = turned(rotary_dim=8)
    np.testing.assert_array_equal(half[..., 8:], q[..., 8:])
    for other in (
        half,
        turned(is_neox_style=False),
        turned(base=5.0),
        turned(config.replace(rope_theta=5.0)),
        turned(config.replace(rope_scaling={"type": "linear", "factor": 2.0})),
    ):
        assert not np.allclose(other, plain)
    np.testing.assert_array_equal(turned(base=5.0), turned(config.replace(rope_theta=5.0)))


@proves("get_basic_causal_mask", "get_basic_causal_mask(max_length)")
@proves("get_basic_causal_mask(dtype)", "precompute_masks", "granted_mask_max_position_embedding")
def test_causal_masks():
    config = EasyDeLBaseConfig(**SIZES)
    mask = config.get_basic_causal_mask(max_length=6, dtype=jnp.float32)
    assert isinstance(mask, ModuleCaches) and mask.dtype == jnp.float32
    np.testing.assert_array_equal(mask[0, 0], np.tril(np.ones((6, 6))))
    assert config.get_basic_causal_mask().shape == (1, 1, 32, 32)
    short = config.replace(mask_max_position_embeddings=8)
    assert short.granted_mask_max_position_embedding == 8
    assert short.get_basic_causal_mask().shape == (1, 1, 8, 8)
    assert config.replace(precompute_masks=False).get_basic_causal_mask() is False


@proves("get_fcm_mask", "get_fcm_mask(batch_size)", "get_fcm_mask(seq_length)")
@proves("get_fcm_mask(deterministic)", "get_fcm_mask(key)", "get_fcm_mask(shape)")
@proves("get_fcm_mask(fcm_ratio)")
def test_both_forms_of_a_forgetful_mask():
    config = EasyDeLBaseConfig(**SIZES, fcm_max_ratio=0.5)
    key = jax.random.key(0)
    assert config.get_fcm_mask(2, 9, deterministic=True) is None
    mask = config.get_fcm_mask(2, 9, deterministic=False, key=key)
    assert mask is not None and mask.shape == (2, 1, 9, 9) and not bool(mask.all())
    given = config.get_fcm_mask(key=key, shape=(64, 1, 4, 64), fcm_ratio=0.25)
    assert given is not None and 0.2 < 1 - float(given.mean()) < 0.3
    other = config.get_fcm_mask(key=jax.random.key(1), shape=(64, 1, 4, 64), fcm_ratio=0.25)
    assert bool((other != given).any())


@proves("get_mask_details", "AttnMaskDetail")
def test_mask_details():
    assert EasyDeLBaseConfig(**SIZES).get_mask_details() is None
    config = EasyDeLBaseConfig(**SIZES)
    config.attach_custom_arguments(
        layer_types=["sliding_attention", "full_attention"], sliding_window=4
    )
    details = config.get_mask_details()
    assert details == {0: AttnMaskDetail("sliding", 4), 1: AttnMaskDetail()}
    with pytest.raises(ConfigError, match="did you mean 'sliding'"):
        AttnMaskDetail("slidding", 4)


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
def test_aliases_and_unknown_keywords():
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
def test_easy_method():
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
def test_closed_lists_are_what_fields_take():
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
def test_extract_commit_hash():
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
def test_set_attrs_smartly():
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
def test_files(remote: bool, tmp_path: Any):
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
def test_the_hub_cache(tmp_path: Any):
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
def test_keywords_of_from_pretrained(tmp_path: Any, caplog: pytest.LogCaptureFixture):
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
def test_pushing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
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
