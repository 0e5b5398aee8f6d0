"""Folders of MaxText and tunix: read as their own conversion scripts define them, and written.

The folders here follow the published mapping
(`maxtext/checkpoint_conversion/utils/param_mapping.py`, `tunix/models/*/params.py`).
"""

from __future__ import annotations

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.testing import require_torch
from ed_models.checkpoints import hub
from ed_models.checkpoints.maxtext_layout import MAXTEXT_ROWS
from ed_trainers.convert import convert
from flax import nnx
from safetensors.numpy import load_file

ONE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 8}
FAMILIES = {
    "llama": {},
    "llama3": {"model_type": "llama", "rope_scaling": LLAMA3},
    "tied_llama": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "mixtral": {**EXPERTS, "sliding_window": None},
    "gemma2": {**GEMMA, "num_hidden_layers": 4, "query_pre_attn_scalar": 64},
    "gemma3_text": {**GEMMA, "num_hidden_layers": 8},
}
DAILY = [("llama3", True), ("llama3", False), ("gemma2", True)]
CASES = [
    pytest.param(name, scanned, marks=() if (name, scanned) in DAILY else pytest.mark.nightly)
    for name in FAMILIES
    for scanned in (True, False)
]


def settings(name, **changes):
    return {"model_type": name, **SIZES, **FAMILIES[name], **changes}


def convert_layer(t, config):
    """Return MaxText's parameters of a layer, by the hooks of its conversion script."""
    heads, kind = config["head_dim"], config["model_type"]
    is_gemma = kind.startswith("gemma")

    def to_kernel(x):
        return x.T.reshape(x.shape[1], -1, heads)

    def alternate(x):
        half = x.shape[-1] // 2
        return np.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)

    rotate = alternate if "rope_scaling" in config else lambda x: x
    q, k, v = (to_kernel(t[f"self_attn.{name}_proj.weight"]) for name in "qkv")
    if kind in ("llama", "mistral", "mixtral", "gemma2"):
        q = q / math.sqrt(config.get("query_pre_attn_scalar", heads))
    out = t["self_attn.o_proj.weight"].T
    layer = {
        "self_attention.query.kernel": rotate(q),
        "self_attention.key.kernel": rotate(k),
        "self_attention.value.kernel": v,
        "self_attention.out.kernel": out.reshape(-1, heads, out.shape[-1]),
    }
    for theirs, ours in {"query": "q", "key": "k", "value": "v"}.items():
        if f"self_attn.{ours}_proj.bias" in t:
            bias = t[f"self_attn.{ours}_proj.bias"].reshape(-1, heads)
            layer[f"self_attention.{theirs}.bias"] = bias
        if f"self_attn.{ours}_norm.weight" in t:
            layer[f"self_attention.{theirs}_norm.scale"] = t[f"self_attn.{ours}_norm.weight"]
    norms = {
        "pre_self_attention_layer_norm": "input_layernorm",
        "post_self_attention_layer_norm": "post_attention_layernorm",
    }
    if is_gemma:
        norms = {
            "pre_self_attention_norm": "input_layernorm",
            "post_self_attention_norm": "post_attention_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    layer |= {f"{theirs}.scale": t[f"{ours}.weight"] for theirs, ours in norms.items()}
    if is_gemma:
        layer = {n: x + 1 if n.endswith("scale") else x for n, x in layer.items()}
    moe = {"mixtral": ("MoeBlock_0", "block_sparse_moe", "w1", "w3", "w2")}
    moe["qwen3_moe"] = ("moe_block", "mlp", "gate_proj", "up_proj", "down_proj")
    if kind not in moe:
        for theirs, ours in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items():
            layer[f"mlp.{theirs}.kernel"] = t[f"mlp.{ours}_proj.weight"].T
        return layer
    block, path, *parts = moe[kind]
    layer[f"{block}.gate.kernel"] = t[f"{path}.gate.weight"].T
    for theirs, ours in zip(("wi_0", "wi_1", "wo"), parts, strict=True):
        layer[f"{block}.{theirs}"] = np.stack(
            [t[f"{path}.experts.{e}.{ours}.weight"].T for e in range(4)]
        )
    return layer


def to_maxtext(tensors, config, *, scanned):
    """Return MaxText's parameters by name."""
    count, kind = config["num_hidden_layers"], config["model_type"]
    layers = []
    for i in range(count):
        start = f"model.layers.{i}."
        parts = {n.removeprefix(start): x for n, x in tensors.items() if n.startswith(start)}
        layers.append(convert_layer(parts, config))
    arrays = {
        "token_embedder.embedding": tensors["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": tensors["model.norm.weight"],
    }
    if kind.startswith("gemma"):
        arrays["token_embedder.embedding"] = arrays["token_embedder.embedding"] * 8
        arrays["decoder.decoder_norm.scale"] = arrays["decoder.decoder_norm.scale"] + 1
    if not config["tie_word_embeddings"]:
        arrays["decoder.logits_dense.kernel"] = tensors["lm_head.weight"].T
    if kind == "gemma2":
        pairs = zip(layers[::2], layers[1::2], strict=True)
        layers = [
            {
                name.replace(".", f"_{which}.", 1): x
                for which, layer in (("local", local), ("global", other))
                for name, x in layer.items()
            }
            for local, other in pairs
        ]
    stacks = {"decoder.layers": layers}
    if kind == "gemma3_text":
        stacks = {f"decoder.layers.layers_{i}": layers[i:6:6] for i in range(6)}
    if scanned:
        for path, stack in stacks.items():
            for name in stack[0]:
                arrays[f"{path}.{name}"] = np.stack([layer[name] for layer in stack], axis=1)
        if kind == "gemma3_text":
            for i, layer in enumerate(layers[6:]):
                path = f"decoder.layers_remainder.layers_{i}"
                arrays |= {f"{path}.{name}": x for name, x in layer.items()}
        return arrays
    for i, layer in enumerate(layers):
        arrays |= {f"decoder.layers_{i}.{name}": x for name, x in layer.items()}
    return arrays


def to_tunix(tensors, config):
    """Return tunix's parameters by name."""
    heads, gemma = config["head_dim"], config["model_type"] == "gemma3_text"
    names = {"self_attn": "attn"}
    if gemma:
        names |= {"input_layernorm.weight": "pre_attention_norm.scale"}
        names |= {"post_attention_layernorm.weight": "post_attention_norm.scale"}
        names |= {"pre_feedforward_layernorm.weight": "pre_ffw_norm.scale"}
        names |= {"post_feedforward_layernorm.weight": "post_ffw_norm.scale"}
        names |= {"q_norm.weight": "_query_norm.scale", "k_norm.weight": "_key_norm.scale"}
        names |= {"model.norm.weight": "final_norm.scale"}
    names |= {"model.embed_tokens.weight": "embedder.input_embedding"}
    names |= (
        {"model.norm.weight": "final_norm.w", "lm_head.weight": "lm_head.w"} if not gemma else {}
    )
    names |= {f"{x}_proj.bias": f"{x}_bias" for x in "qkv"}
    names |= {"_norm.weight": "_norm.w", "layernorm.weight": "layernorm.w"}
    arrays = {}
    for name, x in tensors.items():
        is_matrix = x.ndim == 2 and "embed" not in name
        x = x.T if is_matrix else x
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            x = x.reshape(x.shape[0], -1, heads)
        if name.endswith("o_proj.weight"):
            x = x.reshape(-1, heads, x.shape[1])
        for old, new in names.items():
            name = name.replace(old, new)
        name = name.replace("_proj.weight", "_proj.kernel" if "mlp" in name else "_proj.w")
        arrays[name.removeprefix("model.")] = x
    if gemma:
        for i in range(config["num_hidden_layers"]):
            q, k, v = (arrays.pop(f"layers.{i}.attn.{x}_proj.w").swapaxes(0, 1) for x in "qkv")
            arrays |= {f"layers.{i}.attn.q_einsum.w": q}
            arrays |= {f"layers.{i}.attn.kv_einsum.w": np.stack([k, v])}
            arrays[f"layers.{i}.attn.attn_vec_einsum.w"] = arrays.pop(f"layers.{i}.attn.o_proj.w")
    return {f"{name}.value": x for name, x in arrays.items()}


def nest(arrays):
    tree = {}
    for name, values in arrays.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = values
    return tree


def save_item(item, tree, **options):
    with ocp.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(item, tree)
    return item


def save_maxtext(folder, arrays, config, **options):
    """Save a step as a run of MaxText does, with `config.json` next to it."""
    moments = {f"params.{n}": np.zeros(2, np.float32) for n in ("decoder.x", "y")}
    tree = {"step": 3, "params": {"params": nest(arrays)}, "opt_state": {"0": nest(moments)}}
    save_item(folder / "3" / "items", tree, **{"use_ocdbt": True, "use_zarr3": True, **options})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_tensors(config, dtype="float32"):
    """Return a model's tensors: name -> values, from transformers' shapes."""
    heads = config["head_dim"]
    d, f = config["hidden_size"], config["intermediate_size"]
    sizes = {"q": (config["num_attention_heads"] * heads, d), "k": (2 * heads, d)}
    sizes |= {"v": sizes["k"], "o": (d, sizes["q"][0])}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    shapes |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (config["vocab_size"], d)}
    gemma = config["model_type"].startswith("gemma")
    norms = ["input", "post_attention", *(["pre_feedforward", "post_feedforward"] if gemma else [])]
    for i in range(config["num_hidden_layers"]):
        path = f"model.layers.{i}."
        shapes |= {f"{path}self_attn.{name}_proj.weight": shape for name, shape in sizes.items()}
        shapes |= {f"{path}{name}_layernorm.weight": (d,) for name in norms}
        shapes |= {f"{path}mlp.{name}_proj.weight": (f, d) for name in ("gate", "up")}
        shapes[f"{path}mlp.down_proj.weight"] = (d, f)
    random = np.random.default_rng(0)
    return {n: random.normal(size=s).astype(jnp.dtype(dtype)) / 8 for n, s in shapes.items()}


def load(folder, **keywords):
    return hub.from_pretrained(folder, config_kwargs=ONE, **keywords)


def leaves(model):
    return jax.tree.leaves(nnx.state(model))


def make_hf_model(name, directory, dtype="float32"):
    """Save a random model of transformers; its values are exact in bfloat16, norms plus one too."""
    torch = require_torch()
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**settings(name, pad_token_id=0))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.25
            values = torch.randn_like(parameter) * size
            exact = values.to(torch.bfloat16) if parameter.ndim > 1 else (values * 64).round() / 64
            parameter.copy_(exact.clamp(-0.5, 0.875) if parameter.ndim == 1 else exact)
    model.save_pretrained(directory)
    tokens = torch.arange(1, 33).reshape(2, 16) * 3
    with torch.no_grad():
        logits = model(tokens).logits.numpy()
    tensors = {n: x for file in directory.glob("*.safetensors") for n, x in load_file(file).items()}
    return {n: x.astype(jnp.dtype(dtype)) for n, x in tensors.items()}, tokens.numpy(), logits


@pytest.mark.torch
@pytest.mark.parametrize(("name", "scanned"), CASES)
def test_maxtext_folder_has_logits_of_transformers(tmp_path, name, scanned):
    tensors, tokens, logits = make_hf_model(name, tmp_path / "hf")
    arrays = to_maxtext(tensors, settings(name), scanned=scanned)
    folder = save_maxtext(tmp_path / "maxtext", arrays, settings(name))
    ours = load(folder, precision="highest")(jnp.asarray(tokens)).logits
    assert np.std(logits) > 0.1
    np.testing.assert_allclose(ours, logits, atol=1e-5)


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", "qwen3", "gemma3_text"])
def test_tunix_folder_has_logits_of_transformers(tmp_path, name):
    tensors, tokens, logits = make_hf_model(name, tmp_path / "hf")
    save_item(tmp_path / "run" / "7" / "model_params", nest(to_tunix(tensors, settings(name))))
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings(name)))
    ours = load(tmp_path / "run", precision="highest")(jnp.asarray(tokens)).logits
    np.testing.assert_allclose(ours, logits, atol=1e-5)


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_bfloat16_folder_has_logits_of_transformers(tmp_path, name):
    tensors, tokens, logits = make_hf_model(name, tmp_path / "hf")
    arrays = to_maxtext(tensors, settings(name), scanned=True)
    arrays = {n: x.astype(jnp.bfloat16) for n, x in arrays.items()}
    folder = save_maxtext(tmp_path / "maxtext", arrays, settings(name))
    assert hub.read_config(hub.resolve(folder)).dtype == "bfloat16"
    ours = load(folder, precision="highest")(jnp.asarray(tokens)).logits
    np.testing.assert_allclose(ours, logits, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "scanned"), CASES)
def test_written_folder_is_read_with_equal_bits(tmp_path, name, scanned, dtype):
    cls = hub.registry.get_module("causal-language-model", settings(name)["model_type"])
    config = cls.config_class.from_dict({**settings(name), **ONE})
    model = cls(config, param_dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "maxtext", to="maxtext", scan_layers=scanned)
    convert(tmp_path / "maxtext", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == dtype
    there, again = (load(tmp_path / n, param_dtype=dtype) for n in ("maxtext", "again"))
    is_exact = dtype == "bfloat16" or not name.startswith("gemma")
    for ours, *others in zip(leaves(model), leaves(there), leaves(again), strict=True):
        for other in others:  # a norm plus one loses bits of float32
            assert other.dtype == ours.dtype
            np.testing.assert_allclose(other, ours, rtol=0, atol=0 if is_exact else 2**-23)


def test_written_folder_has_names_and_layers_of_maxtext(tmp_path):
    config = settings("llama3")
    tensors = random_tensors(config)
    folder = save_maxtext(tmp_path / "first", to_maxtext(tensors, config, scanned=True), config)
    for scanned in (True, False):
        target = convert(folder, tmp_path / f"again{scanned}", to="maxtext", scan_layers=scanned)
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.restore(target / "0" / "items")
        assert tree.keys() == {"step", "params", "opt_state"}
        expected = to_maxtext(tensors, config, scanned=scanned)
        jax.tree.map(np.testing.assert_array_equal, tree["params"]["params"], nest(expected))


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/3", "checkpoints/3/items"])
def test_each_level_of_a_run_is_its_newest_model(tmp_path, place):
    config = settings("tied_llama")
    for step in ("20", "3"):
        arrays = to_maxtext(random_tensors(config), config, scanned=True)
        arrays["token_embedder.embedding"] += int(step)
        save_maxtext(tmp_path / "checkpoints", arrays, config)
        if step != "3":
            (tmp_path / "checkpoints" / "3").rename(tmp_path / "checkpoints" / step)
    (tmp_path / "checkpoints" / "config.json").rename(tmp_path / "config.json")
    mean = load(tmp_path / place).model.embed_tokens.embedding.get_value().mean()
    assert round(float(mean)) == (3 if "3" in place else 20)


@pytest.mark.parametrize("options", [{"use_ocdbt": False}, {"use_zarr3": False}])
def test_each_storage_of_orbax_is_read(tmp_path, options):
    config = settings("llama")
    tensors = random_tensors(config)
    arrays = to_maxtext(tensors, config, scanned=False)
    model = load(save_maxtext(tmp_path / "run", arrays, config, **options))
    head = model.lm_head.kernel.get_value()
    np.testing.assert_array_equal(head.T, tensors["lm_head.weight"])


def test_first_axis_may_contain_the_layers(tmp_path):
    config = settings("llama")
    tensors = random_tensors(config)
    arrays = to_maxtext(tensors, config, scanned=True)
    moved = {n: x.swapaxes(0, 1) if ".layers." in n else x for n, x in arrays.items()}
    first, second = (
        load(save_maxtext(tmp_path / name, values, config))
        for name, values in {"first": arrays, "second": moved}.items()
    )
    jax.tree.map(np.testing.assert_array_equal, leaves(first), leaves(second))


def test_rows_beyond_the_vocabulary_are_omitted_and_written(tmp_path, monkeypatch):
    monkeypatch.setitem(MAXTEXT_ROWS, 128, 160)
    config = settings("gemma2")
    arrays = to_maxtext(random_tensors(config), config, scanned=True)
    table = arrays["token_embedder.embedding"]
    padded = {**arrays, "token_embedder.embedding": np.pad(table, ((0, 32), (0, 0)))}
    folder = save_maxtext(tmp_path / "run", padded, config)
    np.testing.assert_allclose(load(folder).model.embed_tokens.embedding.get_value() * 8, table)
    with ocp.PyTreeCheckpointer() as checkpointer:
        item = convert(folder, tmp_path / "again", to="maxtext") / "0" / "items"
        again = checkpointer.restore(item)["params"]["params"]["token_embedder"]["embedding"]
    np.testing.assert_array_equal(again, padded["token_embedder.embedding"])


def test_head_of_a_tied_model_is_read_if_it_differs(tmp_path):
    config = settings("llama")
    arrays = to_maxtext(random_tensors(config), config, scanned=True)
    model = load(save_maxtext(tmp_path / "run", arrays, {**config, "tie_word_embeddings": True}))
    assert not model.config.tie_word_embeddings
    head = arrays["decoder.logits_dense.kernel"]
    np.testing.assert_array_equal(model.lm_head.kernel.get_value(), head)


def test_configuration_can_be_in_another_folder(tmp_path):
    config = settings("llama")
    arrays = to_maxtext(random_tensors(config), config, scanned=True)
    folder = save_maxtext(tmp_path / "run", arrays, config)
    (tmp_path / "hf").mkdir()
    (folder / "config.json").rename(tmp_path / "hf" / "config.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json.*--config FOLDER"):
        convert(folder, tmp_path / "model")
    convert(folder, tmp_path / "model", config=tmp_path / "hf")
    convert(folder, tmp_path / "maxtext", config=tmp_path / "hf", to="maxtext")
    assert load(tmp_path / "maxtext").config.model_type == "llama"
    stored = load_file(tmp_path / "model" / "model.safetensors")
    expected = random_tensors(config)
    assert stored.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(stored[name], values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4}, "none of its first two axes|neither its first nor its second"),
        ({"num_hidden_layers": 4, "unscanned": True}, r"lacks \(9\): decoder\.layers_3\.mlp"),
        ({"num_hidden_layers": 2, "unscanned": True}, r"further arrays \(9\): decoder\.layers_2"),
        ({"model_type": "qwen2"}, r"lacks \(3\): decoder\.layers\.self_attention\.key\.bias"),
        ({"model_type": "gpt2"}, "MaxText's names, and config.json the model type 'gpt2'"),
        ({"tie_word_embeddings": True, "drop": "decoder.logits_dense.kernel"}, None),
        ({"drop": "decoder.logits_dense.kernel"}, r"lacks \(1\): decoder\.logits_dense\.kernel"),
        ({"drop": "token_embedder.embedding"}, "none is an embedding of MaxText or tunix"),
        ({"hidden_size": 32}, "shape"),
    ],
)
def test_folder_that_does_not_fit_is_an_error_with_names(tmp_path, change, message):
    stored = settings("llama")
    config = {n: x for n, x in (stored | change).items() if n not in ("unscanned", "drop")}
    arrays = to_maxtext(random_tensors(stored), stored, scanned="unscanned" not in change)
    arrays.pop(change.get("drop"), None)
    folder = save_maxtext(tmp_path / "run", arrays, config)
    if message is None:
        assert load(folder).config.tie_word_embeddings
        return
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("ocdbt", [True, False])
def test_damaged_file_is_an_error_with_the_array(tmp_path, ocdbt):
    config = settings("llama")
    arrays = to_maxtext(random_tensors(config), config, scanned=True)
    folder = save_maxtext(tmp_path / "run", arrays, config, use_ocdbt=ocdbt)
    item = folder / "3" / "items"
    if ocdbt:
        for file in (f for f in item.rglob("d/*") if f.stat().st_size > 4096):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        shutil.rmtree(item / "params.params.decoder.layers.mlp.wo.kernel" / "c")
    with pytest.raises(CheckpointError, match=r"params\.params\..* is damaged or absent"):
        load(folder)
    (item / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="_METADATA is damaged"):
        load(folder)
    text = {"tree_metadata": {"x": {"key_metadata": [{"key": "../a"}]}}}
    text["tree_metadata"]["x"]["value_metadata"] = {"value_type": "jax.Array"}
    (item / "_METADATA").write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match="is no name of an array"):
        load(folder)


def test_checkpoint_of_this_project_is_no_folder_of_maxtext(tmp_path):
    save_item(tmp_path / "100" / "arrays", {"a": np.zeros(3)})
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it holds no model"):
        load(tmp_path)


def test_options_that_have_no_effect_are_errors(tmp_path):
    config = settings("llama")
    arrays = to_maxtext(random_tensors(config), config, scanned=True)
    folder = save_maxtext(tmp_path / "run", arrays, config)
    with pytest.raises(ConfigError, match="only with to='maxtext'"):
        convert(folder, tmp_path / "out", scan_layers=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        convert(folder, tmp_path / "full", to="maxtext")


def test_family_without_a_known_layout_is_an_error(tmp_path):
    cls = hub.registry.get_module("causal-language-model", "gpt2")
    config = cls.config_class(n_layer=1, n_head=2, n_embd=16, vocab_size=32, **ONE)
    cls(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="family of MaxText's folders"):
        convert(tmp_path / "model", tmp_path / "out", to="maxtext")
