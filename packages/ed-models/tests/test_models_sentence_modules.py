"""Embedding checkpoints: modules, prompts and lengths equal those of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_models import AutoEasyDeLModelForCausalLM, AutoEasyDeLModelForEmbedding
from ed_models.checkpoints import hub
from ed_models.checkpoints.embedding_settings import EmbeddingSettings
from ed_models.checkpoints.tokenizers import load_tokenizer
from ed_models.tasks.pooling import Pooling
from ed_models.tasks.sentence_modules import SentenceModules
from flax import nnx
from safetensors.numpy import load_file, save_file

ONE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "query", ":", "passage", "the", "a", "cat", "dog"]
WORDS += ["sleeps", "barks", "The", "Cat", "river", "stone", "blue"]
TEXTS = ["The cat sleeps", "a dog barks the blue stone river cat", "river"]
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def words_tokenizer() -> Any:
    """Return a tokenizer with one token per word, and types 0 and 1 for a pair of texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: place for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
    )


def save_body(folder: Path, kind: str) -> Any:
    """Save a tiny body of transformers with random weights, and its tokenizer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "qwen3":
        config = transformers.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=4)
    else:
        config = getattr(transformers, f"{kind}Config")(**SHAPE)
    model = transformers.AutoModel.from_config(config).eval()
    model.save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return model


def add_modules(folder: Path, modes: list[str], *, include_prompt: bool = True) -> dict[str, Any]:
    """Add a pooling, two dense layers and a normalization in the files of old versions.

    Returns:
        Name -> array of the weights, float32.
    """
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    paths = ["", *(f"{place}_{kind}" for place, kind in enumerate(kinds) if place)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    files = {"modules.json": modules}
    keys = {f"pooling_mode_{mode}": True for mode in modes}
    files["1_Pooling/config.json"] = {
        "word_embedding_dimension": 16,
        **keys,
        "include_prompt": include_prompt,
    }
    sizes, weights = (16 * len(modes), 24, 12), {}
    rng = np.random.default_rng(0)
    for place, act, bias in ((2, "linear.Identity", False), (3, "activation.Tanh", True)):
        d, e = sizes[place - 2 : place]
        values = {"linear.weight": rng.normal(0, 0.3, (e, d)).astype(np.float32)}
        if bias:
            values["linear.bias"] = rng.normal(0, 0.3, e).astype(np.float32)
        (folder / f"{place}_Dense").mkdir()
        save_file(values, folder / f"{place}_Dense/model.safetensors")
        weights |= {f"{place}.{name}": value for name, value in values.items()}
        files[f"{place}_Dense/config.json"] = {
            "in_features": d,
            "out_features": e,
            "bias": bias,
            "activation_function": f"torch.nn.modules.{act}",
        }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return weights


def arrays_of(texts: list[str], folder: Path) -> dict[str, np.ndarray]:
    """Return the padded tokens of texts and their mask."""
    tokens = load_tokenizer(str(folder))(texts, padding=True, return_token_type_ids=False)
    return {name: np.asarray(values, np.int32) for name, values in tokens.items()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Any]]:
    """A checkpoint with two dense layers, the body in torch, and the weights of the layers."""
    folder = tmp_path_factory.mktemp("dense") / "model"
    body = save_body(folder, "Bert")
    weights = add_modules(folder, ["cls_token", "mean_tokens"], include_prompt=False)
    settings = {
        "prompts": {"query": "query: ", "passage": "passage: "},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
        "another": 1,
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (folder / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 8, "do_lower_case": true}'
    )
    return folder, body, weights


@pytest.mark.torch
@pytest.mark.nightly
def test_dense_layers_and_prompts_equal_the_formula_in_torch(dense: Any) -> None:
    folder, body, weights = dense
    import torch

    inputs = arrays_of([f"query : {text}" for text in TEXTS], folder)
    with torch.no_grad():
        hidden = body(**{name: torch.tensor(x).long() for name, x in inputs.items()})[0]
        rows = []
        for row, mask in zip(hidden, inputs["attention_mask"], strict=True):
            tokens = row[mask != 0][3:]  # without [CLS] and the prompt
            x = torch.cat([tokens[0], tokens.mean(0)])
            x = x @ torch.tensor(weights["2.linear.weight"]).T
            weight, bias = (torch.tensor(weights[f"3.linear.{n}"]) for n in ("weight", "bias"))
            rows.append(torch.nn.functional.linear(x, weight, bias).tanh())
        want = torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()
        short = torch.nn.functional.normalize(torch.stack(rows)[:, :5], dim=1).numpy()
    model = AutoEasyDeLModelForEmbedding.from_pretrained(folder, **ONE)
    assert model.pooling == Pooling(("cls", "mean"), normalize=True)
    found = model(**inputs, prompt_length=3)
    np.testing.assert_allclose(found.embeddings, want, atol=1e-5)
    assert model.embedding_dimension == 12
    cut = AutoEasyDeLModelForEmbedding.from_pretrained(folder, truncate_dim=5, **ONE)
    np.testing.assert_allclose(cut(**inputs, prompt_length=3).embeddings, short, atol=1e-5)
    assert cut.embedding_dimension == 5
    # Packed texts have the same vectors.
    mask = inputs["attention_mask"]
    packed = np.concatenate([r[m != 0] for r, m in zip(inputs["input_ids"], mask, strict=True)])
    ids = np.repeat([1, 2, 3], mask.sum(1))[None]
    both = model(packed[None], segment_ids=jnp.asarray(ids), segments=3, prompt_length=3)
    np.testing.assert_allclose(both.embeddings[0], want, atol=1e-5)


@pytest.mark.torch
@pytest.mark.nightly
def test_saved_checkpoint_keeps_modules_weights_and_settings(dense: Any, tmp_path: Path) -> None:
    folder, _, weights = dense
    model = AutoEasyDeLModelForEmbedding.from_pretrained(folder, truncate_dim=7, **ONE)
    model.save_pretrained(tmp_path / "m", max_shard_size=2000)
    assert not [n for n in hub.open_tensors(tmp_path / "m") if "transforms" in n or "linear" in n]
    for name in ("2.linear.weight", "3.linear.weight", "3.linear.bias"):
        place, _, tensor = name.partition(".")
        stored = load_file(tmp_path / f"m/{place}_Dense/model.safetensors")[tensor]
        np.testing.assert_array_equal(stored, weights[name])
    for name in ("2_Dense/config.json", "3_Dense/config.json", "sentence_bert_config.json"):
        theirs = json.loads((folder / name).read_text())
        assert json.loads((tmp_path / "m" / name).read_text()) == theirs
    settings = json.loads((tmp_path / "m/config_sentence_transformers.json").read_text())
    assert (settings["another"], settings["truncate_dim"]) == (1, 7)
    again: Any = hub.from_pretrained(tmp_path / "m", task="auto-bind", **ONE)
    assert again.pooling == model.pooling and again.embedding_settings == model.embedding_settings
    inputs = arrays_of(TEXTS, folder)
    np.testing.assert_array_equal(again(**inputs).embeddings, model(**inputs).embeddings)
    model.save_pretrained(tmp_path / "half", dtype="bfloat16")
    half = load_file(tmp_path / "half/2_Dense/model.safetensors")["linear.weight"]
    assert half.dtype.name == "bfloat16"


@pytest.mark.nightly
@pytest.mark.torch
def test_dense_layers_train_with_the_body(dense: Any) -> None:
    model = AutoEasyDeLModelForEmbedding.from_pretrained(dense[0], **ONE)
    inputs = arrays_of(TEXTS, dense[0])

    def loss(model: Any) -> Any:
        return jnp.sum(model(**inputs).embeddings[:, 0])

    grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param))(model)
    flat = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(grads)}
    norms = {name: float(jnp.linalg.norm(x[...])) for name, x in flat.items()}
    assert norms["transforms.0.kernel"] > 0 and norms["transforms.1.bias"] > 0


@pytest.mark.torch
def test_pickled_dense_weights_require_consent(dense: Any, tmp_path: Path) -> None:
    import shutil

    import torch

    folder, _, weights = dense
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m/2_Dense/model.safetensors").unlink()
    tensors = {"linear.weight": torch.tensor(weights["2.linear.weight"])}
    torch.save(tensors, tmp_path / "m/2_Dense/pytorch_model.bin")
    with pytest.raises(CheckpointError, match="allow_pickle"):
        AutoEasyDeLModelForEmbedding.from_pretrained(tmp_path / "m", **ONE)
    model = AutoEasyDeLModelForEmbedding.from_pretrained(tmp_path / "m", allow_pickle=True, **ONE)
    kernel = np.asarray(model.transforms[0].kernel[...])
    np.testing.assert_array_equal(kernel.T, weights["2.linear.weight"])


@pytest.mark.torch
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("2_Dense/config.json", {"activation_function": "os.system"}, "activation_function='os"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ("3_Dense/config.json", {"in_features": 5}, "its input has 24 features"),
        ("3_Dense/config.json", {"out_features": 5}, "has the tensors"),
        ("1_Pooling/config.json", {"pooling_mode": ["maen"]}, r"the pooling modes \['maen'\]"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "must map names to texts"),
        ("config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim is 0"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name"),
    ],
)
def test_damaged_settings_raise_an_error_with_the_value(
    dense: Any, tmp_path: Path, file: str, content: dict[str, Any], message: str
) -> None:
    import shutil

    shutil.copytree(dense[0], tmp_path / "m")
    path = tmp_path / "m" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(CheckpointError, match=message):
        AutoEasyDeLModelForEmbedding.from_pretrained(tmp_path / "m", **ONE)


@pytest.mark.torch
def test_dense_weights_that_are_not_finite_raise_an_error(dense: Any, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(dense[0], tmp_path / "m")
    values = {"linear.weight": np.full((24, 32), np.nan, np.float32)}
    save_file(values, tmp_path / "m/2_Dense/model.safetensors")
    with pytest.raises(CheckpointError, match=r"linear.weight has NaN"):
        AutoEasyDeLModelForEmbedding.from_pretrained(tmp_path / "m", **ONE)


@pytest.mark.torch
def test_prompts_are_found_by_name(dense: Any) -> None:
    settings = EmbeddingSettings.read(dense[0])
    assert settings.prompt() == "query: " and settings.prompt("passage") == "passage: "
    assert settings.first_prompt("documents", "passage") == "passage: "
    assert settings.prompt("document") == settings.prompt("") == ""
    assert settings.first_prompt("other") == "query: "
    assert (settings.similarity_fn_name, settings.max_seq_length) == ("dot", 8)
    with pytest.raises(ConfigError, match="'pasage'; did you mean 'passage'"):
        settings.prompt("pasage")
    tokenizer = load_tokenizer(str(dense[0]))
    assert tokenizer("The CAT")["input_ids"] == [1, 7, 9, 2], "do_lower_case"


@pytest.mark.nightly
@pytest.mark.torch
def test_truncate_dim_is_at_most_the_size_of_the_vectors(dense: Any) -> None:
    with pytest.raises(ConfigError, match="truncate_dim=13 exceeds the 12 elements"):
        AutoEasyDeLModelForEmbedding.from_pretrained(dense[0], truncate_dim=13, **ONE)
    with pytest.raises(ConfigError, match="truncate_dim=0 is invalid"):
        AutoEasyDeLModelForEmbedding.from_pretrained(dense[0], truncate_dim=0, **ONE)
    with pytest.raises(ConfigError, match="truncate_dim=4 has no effect on BertModel"):
        hub.from_pretrained(dense[0], task="base-module", truncate_dim=4, **ONE)


def test_order_of_pooling_modes_survives_a_round_trip(tmp_path: Path) -> None:
    for place, mode in enumerate((["mean", "cls"], ["cls", "mean"], ["lasttoken"])):
        folder = tmp_path / str(place)
        folder.mkdir()
        pooling = Pooling.of(mode)
        SentenceModules(pooling, include_prompt=False).write(folder, 16)
        found = SentenceModules.read(folder)
        assert found is not None and found.pooling == pooling and not found.include_prompt


CASES = {
    "bert, mean": ("Bert", "mean", []),
    "roberta, cls": ("Roberta", "cls", ["Normalize"]),
    "decoder, lasttoken": ("qwen3", "lasttoken", ["Normalize"]),
    "two dense layers": ("Bert", ("mean", "max"), ["Dense", "Normalize", "Dense"]),
}


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_vectors_equal_sentence_transformers_before_and_after_saving(
    case: str, include_prompt: bool, tmp_path: Path
) -> None:
    library: Any = pytest.importorskip("sentence_transformers")
    import torch

    kind, mode, after = CASES[case]
    save_body(tmp_path / "body", kind)
    modules = library.sentence_transformer.modules
    base = library.base.modules
    layers: list[Any] = [
        base.Transformer(str(tmp_path / "body"), max_seq_length=30),
        modules.Pooling(16, mode, include_prompt=include_prompt),
    ]
    size = 16 if isinstance(mode, str) else 32
    torch.manual_seed(1)
    for name in after:
        if name == "Normalize":
            layers.append(base.Normalize())
            continue
        kinds = {32: torch.nn.Tanh(), 24: torch.nn.GELU()}
        layers.append(base.Dense(size, size - 8, bias=size == 32, activation_function=kinds[size]))
        size -= 8
    prompts = {"query": "query: ", "document": ""}
    theirs = library.SentenceTransformer(modules=layers, prompts=prompts, device="cpu").eval()
    theirs.save(str(tmp_path / "theirs"))
    encode = {"normalize_embeddings": "Normalize" in after[-1:], "convert_to_numpy": True}

    def check(model: Any, other: Any) -> None:
        for name in ("query", "document"):
            want = other.encode(TEXTS, prompt_name=name, **encode)
            prompt = model.embedding_settings.prompt(name)
            inputs = arrays_of([prompt + text for text in TEXTS], tmp_path / "body")
            length = 3 if prompt else 0
            found = model(**inputs, prompt_length=length).embeddings
            np.testing.assert_allclose(found, want, atol=1e-5)

    model = AutoEasyDeLModelForEmbedding.from_pretrained(tmp_path / "theirs", **ONE)
    check(model, theirs)
    tokenizer = load_tokenizer(str(tmp_path / "theirs"))
    assert model.embedding_settings.max_seq_length == 30
    model.save_pretrained(tmp_path / "ours", tokenizer=tokenizer)
    again = library.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert again.max_seq_length == 30 and again.prompts == prompts
    check(model, again)
    cut = AutoEasyDeLModelForEmbedding.from_pretrained(tmp_path / "ours", truncate_dim=6, **ONE)
    cut.save_pretrained(tmp_path / "cut", tokenizer=tokenizer)
    shorter = library.SentenceTransformer(str(tmp_path / "cut"), device="cpu")
    assert shorter.truncate_dim == 6
    check(cut, shorter)


@pytest.mark.nightly
def test_language_model_over_an_embedder_removes_its_modules(tmp_path: Path) -> None:
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPE, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = LlamaForCausalLM.create(LlamaConfig(**shape, **ONE))
    (tmp_path / "m/2_Dense").mkdir(parents=True)
    (tmp_path / "m/config_sentence_transformers.json").write_text("{}")
    model.save_pretrained(tmp_path / "m")
    assert not (tmp_path / "m/2_Dense").exists()
    assert not (tmp_path / "m/config_sentence_transformers.json").exists()
    assert AutoEasyDeLModelForCausalLM.from_pretrained(tmp_path / "m", **ONE)
