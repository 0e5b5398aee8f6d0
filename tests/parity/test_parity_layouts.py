"""Checkpoints in the layout of published files load as in transformers.

Each case saves a tiny random model with torch, changes the file, loads it in both libraries, and
compares the outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ed_models.auto as auto
import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_models.checkpoints.leftovers import find_leftovers
from ed_models.checkpoints.task_rules import get_weight_rules
from ed_models.checkpoints.weight_map import WeightMap

from tests.conformance.cases import subjects

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

BOUND = 3e-4
TEXTS = {"input_ids": np.asarray([[5, 17, 60, 33, 9, 71], [8, 90, 41, 12, 55, 6]])}
PAIRS = {**TEXTS, "decoder_input_ids": np.asarray([[0, 7, 20, 31], [0, 50, 11, 4]])}
LAST, LOGITS = ("last_hidden_state",), ("logits",)


@dataclass(frozen=True)
class Layout:
    """One checkpoint.

    Attributes:
        family: model type, of which the first tiny configuration is used.
        saved: class of transformers that writes the file.
        added: name -> shape of a leftover, or the name of a tensor that is copied.
        removed: pattern of removed tensors.
        renamed: pattern and replacement.
        reader: class of transformers that reads the file; None = `saved`.
        auto: class of this project.
        outputs: compared outputs; empty = only loading.
        inputs: arrays of the call; "images" and "sound" represent random ones.
        fields: fields that replace those of the configuration.
    """

    family: str
    saved: str
    auto: str
    outputs: tuple[str, ...] = LOGITS
    added: Mapping[str, Any] = field(default_factory=dict)
    removed: str | None = None
    renamed: tuple[str, str] = ("", "")
    reader: str | None = None
    inputs: Any = field(default_factory=lambda: TEXTS)
    fields: Mapping[str, Any] = field(default_factory=dict)


GAMMA = (r"LayerNorm\.(weight|bias)$", "LayerNorm.{gamma_beta}")
MTP = {"eh_proj.weight": (32, 64), "enorm.weight": (32,), "mlp.experts.0.up_proj.weight": (4, 4)}
T5_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
PRETRAINED = {
    "quantizer.codevectors": (1, 12, 4),
    "quantizer.weight_proj.weight": (12, 16),
    "project_q.weight": (8, 8),
    "project_hid.bias": (8,),
}


def layouts() -> dict[str, Layout]:
    """Return the cases by name; the first of each kind runs by default."""
    cases: dict[str, Layout] = {}
    # Buffers of old releases.
    for family, prefix in (("clip", "text_model."), ("clip", "vision_model.")):
        name = f"{prefix}embeddings.position_ids"
        cases[f"buffer {prefix} {family}"] = Layout(
            family,
            "CLIPModel",
            "AutoEasyDeLModelForZeroShotImageClassification",
            ("logits_per_image",),
            {name: (1, 16)},
            inputs={**TEXTS, "pixel_values": "images"},
        )
    for family, saved, name in (
        ("bert", "BertModel", "embeddings.position_ids"),
        ("bert", "BertModel", "embeddings.token_type_ids"),
        ("roberta", "RobertaModel", "embeddings.position_ids"),
        ("mpnet", "MPNetModel", "embeddings.position_ids"),
        ("nomic_bert", "NomicBertModel", "rotary_emb.inv_freq"),
        ("nomic_bert", "NomicBertModel", "rotary_emb.original_inv_freq"),
    ):
        cases[f"buffer {name} {family}"] = Layout(
            family, saved, "AutoEasyDeLModel", LAST, {name: (1, 8)}
        )
    for family, saved, name in (
        ("llama", "LlamaForCausalLM", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama", "LlamaForCausalLM", "model.rotary_emb.inv_freq"),
        ("gpt2", "GPT2LMHeadModel", "transformer.h.0.attn.bias"),
        ("gpt2", "GPT2LMHeadModel", "transformer.h.0.attn.masked_bias"),
        ("gptj", "GPTJForCausalLM", "transformer.h.0.attn.masked_bias"),
        ("gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
        ("falcon", "FalconForCausalLM", "transformer.h.0.self_attention.rotary_emb.inv_freq"),
    ):
        cases[f"buffer {name}"] = Layout(
            family, saved, "AutoEasyDeLModelForCausalLM", added={name: (4,)}
        )
    for family, saved in (
        ("bart", "BartForConditionalGeneration"),
        ("mbart", "MBartForConditionalGeneration"),
    ):
        version = {"model.encoder.version": (1,), "model.decoder.version": (1,)}
        cases[f"buffer version {family}"] = Layout(
            family, saved, "AutoEasyDeLModelForSeq2SeqLM", added=version, inputs=PAIRS
        )
    # Tables and copies of encoder-decoders.
    for family, saved in (
        ("t5", "T5ForConditionalGeneration"),
        ("mt5", "MT5ForConditionalGeneration"),
        ("umt5", "UMT5ForConditionalGeneration"),
        ("longt5", "LongT5ForConditionalGeneration"),
    ):
        row = Layout(family, saved, "AutoEasyDeLModelForSeq2SeqLM", inputs=PAIRS)
        cases[f"table {family}"] = replace_row(row, added={T5_BIAS: (8, 4)})
    row = Layout("t5", "T5ForConditionalGeneration", "AutoEasyDeLModelForSeq2SeqLM", inputs=PAIRS)
    copies = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}
    cases["copied head t5"] = replace_row(row, added={"lm_head.weight": "shared.weight", **copies})
    cases["other head t5"] = replace_row(row, added={"lm_head.weight": (160, 32)})
    # Norms under their first names, with and without the prefix.
    for family, saved, task, outputs in (
        ("bert", "BertForPreTraining", "AutoEasyDeLModel", (*LAST, "pooler_output")),
        ("bert", "BertForPreTraining", "AutoEasyDeLModelForEmbedding", LAST),
        ("bert", "BertForPreTraining", "AutoEasyDeLModelForMaskedLM", LOGITS),
        ("bert", "BertModel", "AutoEasyDeLModel", LAST),
        ("electra", "ElectraForPreTraining", "AutoEasyDeLModel", LAST),
        ("roberta", "RobertaForMaskedLM", "AutoEasyDeLModelForMaskedLM", LOGITS),
        ("albert", "AlbertForPreTraining", "AutoEasyDeLModelForMaskedLM", LOGITS),
    ):
        model = saved.partition("For")[0].removesuffix("Model")
        reader = f"{model}ForMaskedLM" if outputs == LOGITS else f"{model}Model"
        cases[f"gamma {saved} {task}"] = Layout(
            family, saved, task, outputs, renamed=GAMMA, reader=reader
        )
    cases["positions deberta-v2"] = Layout(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        "AutoEasyDeLModelForMaskedLM",
        added={"deberta.embeddings.position_embeddings.weight": (40, 32)},
        fields={"position_biased_input": False},
    )
    cases["positions deberta-v2 body"] = Layout(
        "deberta-v2",
        "DebertaV2Model",
        "AutoEasyDeLModel",
        LAST,
        added={"embeddings.position_embeddings.weight": (40, 32)},
        fields={"position_biased_input": False},
    )
    # Tensors that only training reads, and tensors of pretraining.
    speech = Layout(
        "wav2vec2", "Wav2Vec2ForCTC", "AutoEasyDeLModelForCTC", inputs={"input_values": "sound"}
    )
    cases["no masked_spec_embed"] = replace_row(speech, removed=r"masked_spec_embed$")
    cases["quantizer of pretraining"] = replace_row(speech, added=PRETRAINED)
    cases["weight norm of old torch"] = replace_row(
        speech, renamed=(r"parametrizations\.weight\.original([01])", "weight_{g_v}")
    )
    cases["new CTC head"] = Layout(
        "wav2vec2",
        "Wav2Vec2ForPreTraining",
        "AutoEasyDeLModelForCTC",
        (),
        reader="Wav2Vec2ForCTC",
        inputs={"input_values": "sound"},
    )
    for family, saved in (("dinov2", "Dinov2Model"), ("dinov3_vit", "DINOv3ViTModel")):
        cases[f"no mask_token {family}"] = Layout(
            family,
            saved,
            "AutoEasyDeLVisionModel",
            LAST,
            removed=r"mask_token$",
            inputs={"pixel_values": "images"},
        )
    # Layers for the prediction of further tokens.
    for family, saved in (
        ("glm4_moe", "Glm4MoeForCausalLM"),
        ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ):
        depth = subjects(family)[0].fields["num_hidden_layers"]
        cases[f"mtp {family}"] = Layout(
            family,
            saved,
            "AutoEasyDeLModelForCausalLM",
            added={f"model.layers.{depth}.{name}": shape for name, shape in MTP.items()},
        )
    for family, saved, name in (
        ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "model.mtp_block.0.mlp.up_proj.weight"),
        ("olmo_hybrid", "OlmoHybridForCausalLM", "mtp.fc.weight"),
        ("exaone_moe", "ExaoneMoeForCausalLM", "mtp.fc.weight"),
        ("nemotron_h", "NemotronHForCausalLM", "mtp.layers.0.norm.weight"),
        ("qwen3_next", "Qwen3NextForCausalLM", "mtp.fc.weight"),
    ):
        cases[f"mtp {family}"] = Layout(
            family, saved, "AutoEasyDeLModelForCausalLM", added={name: (4, 4)}
        )
    # Heads of other tasks.
    images = {"pixel_values": "images"}
    cases["teacher of deit"] = Layout(
        "deit",
        "DeiTForImageClassificationWithTeacher",
        "AutoEasyDeLModelForImageClassification",
        inputs=images,
    )
    cases["value head of llama"] = Layout(
        "llama",
        "LlamaForCausalLM",
        "AutoEasyDeLModelForCausalLM",
        added={"v_head.summary.weight": (1, 32), "v_head.summary.bias": (1,)},
    )
    cases["two heads of gpt2"] = Layout(
        "gpt2", "GPT2DoubleHeadsModel", "AutoEasyDeLModelForCausalLM", reader="GPT2LMHeadModel"
    )
    for saved in ("T5ForSequenceClassification", "T5ForQuestionAnswering"):
        cases[saved] = Layout(
            "t5",
            saved,
            "AutoEasyDeLModelForSeq2SeqLM",
            reader="T5ForConditionalGeneration",
            inputs=PAIRS,
        )
    for saved in ("BartForSequenceClassification", "BartForQuestionAnswering"):
        cases[saved] = Layout(
            "bart",
            saved,
            "AutoEasyDeLModelForSeq2SeqLM",
            reader="BartForConditionalGeneration",
            inputs=PAIRS,
        )
    # Towers of models that compare images with texts.
    for stem, family in (("CLIP", "clip"), ("Siglip", "siglip"), ("Siglip2", "siglip2")):
        packed = family == "siglip2"
        cases[f"vision tower of {family}"] = Layout(
            family,
            f"{stem}Model",
            "AutoEasyDeLVisionModel",
            () if packed else LAST,
            reader=f"{stem}VisionModel",
            inputs=images,
        )
        cases[f"text tower of {family}"] = Layout(
            family,
            f"{stem}Model",
            "AutoEasyDeLModel",
            (*LAST, "pooler_output"),
            reader=f"{stem}TextModel",
        )
    cases["tower with projection"] = Layout(
        "clip_vision_model",
        "CLIPVisionModelWithProjection",
        "AutoEasyDeLVisionModel",
        LAST,
        reader="CLIPVisionModel",
        inputs=images,
    )
    return cases


def replace_row(row: Layout, **changes: Any) -> Layout:
    import dataclasses

    return dataclasses.replace(row, **changes)


CASES = layouts()
DAILY = (
    *("table t5", "other head t5", "gamma BertForPreTraining AutoEasyDeLModel"),
    *("no masked_spec_embed", "mtp ernie4_5_moe", "teacher of deit", "text tower of siglip"),
)


def write_checkpoint(layout: Layout, folder: Path) -> dict[str, Any]:
    """Save and change a checkpoint; return the fields of its configuration."""
    import transformers
    from safetensors.torch import load_file, save_file

    fields = {**subjects(layout.family)[0].fields, **layout.fields}
    config = transformers.AutoConfig.for_model(layout.family, **fields)
    torch.manual_seed(3)
    model = getattr(transformers, layout.saved)(config).eval()
    for value in model.parameters():
        torch.nn.init.normal_(value, 1.0 if value.ndim == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kinds = {"weight": "gamma", "bias": "beta", "0": "g", "1": "v"}
    pattern, replacement = layout.renamed

    def rename(match: re.Match[str]) -> str:
        kind = kinds[match[1]]
        return replacement.format(gamma_beta=kind, g_v=kind)

    if pattern:
        assert any(re.search(pattern, name) for name in tensors)
        tensors = {re.sub(pattern, rename, name): value for name, value in tensors.items()}
    if layout.removed:
        names = [name for name in tensors if re.search(layout.removed, name)]
        assert names
        tensors = {name: value for name, value in tensors.items() if name not in names}
    for name, value in layout.added.items():
        is_copy = isinstance(value, str)
        tensors[name] = tensors[value].clone() if is_copy else 0.1 * torch.randn(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return fields


def arrays_of(layout: Layout, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    size = (fields.get("vision_config") or fields).get("image_size", 8)
    random = {"images": (2, 3, size, size), "sound": (2, 900)}
    return {
        name: rng.normal(size=random[value]).astype(np.float32) if isinstance(value, str) else value
        for name, value in layout.inputs.items()
    }


@pytest.mark.daily("gamma BertForPreTraining AutoEasyDeLModel")
@pytest.mark.parametrize("name", CASES)
def test_published_layout_loads_as_in_transformers(name: str, tmp_path: Path) -> None:
    import transformers

    layout = CASES[name]
    fields = write_checkpoint(layout, tmp_path)
    ours: Any = getattr(auto, layout.auto).from_pretrained(tmp_path, dtype="float32")
    reader: Any = getattr(transformers, layout.reader or layout.saved)
    reference = reader.from_pretrained(tmp_path).eval()
    if not layout.outputs:
        return
    inputs = arrays_of(layout, fields)
    with torch.no_grad():
        expected = reference(**{key: torch.tensor(value) for key, value in inputs.items()})
    outputs = ours(**inputs)
    for output in layout.outputs:
        got, right = np.asarray(getattr(outputs, output)), getattr(expected, output).numpy()
        np.testing.assert_allclose(got, right, atol=BOUND)


def test_missing_and_misspelled_weights_beside_leftovers_are_refused(tmp_path: Path) -> None:
    layout = replace_row(
        CASES["mtp glm4_moe"], renamed=(r"model\.norm\.(weight)", "model.norm_{gamma_beta}")
    )
    write_checkpoint(layout, tmp_path)
    with pytest.raises(CheckpointError) as error:
        auto.AutoEasyDeLModelForCausalLM.from_pretrained(tmp_path)
    assert "missing (1):\n    model.norm.weight" in str(error.value)
    assert "not in the model (1):\n    model.norm_gamma" in str(error.value)
    assert "eh_proj" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.9.self_attn.q_proj.weight", "model.layers.0.self_attn.q_norm.weight"),
        *("model.pre_norm.weight", "lm_head.bias", "model.embed_positions.weight"),
    ],
)
def test_leftovers_that_may_change_numbers_are_refused(name: str, tmp_path: Path) -> None:
    layout = Layout("llama", "LlamaForCausalLM", "AutoEasyDeLModelForCausalLM", added={name: (8,)})
    write_checkpoint(layout, tmp_path)
    with pytest.raises(CheckpointError, match=r"not in the model \(1\):\n +" + re.escape(name)):
        auto.AutoEasyDeLModelForCausalLM.from_pretrained(tmp_path)


def test_a_file_of_the_task_without_its_head_is_refused(tmp_path: Path) -> None:
    layout = replace_row(CASES["no masked_spec_embed"], removed=r"lm_head")
    write_checkpoint(layout, tmp_path)
    with pytest.raises(CheckpointError, match=r"missing \(2\)"):
        auto.AutoEasyDeLModelForCTC.from_pretrained(tmp_path)


def ignored_by_transformers() -> list[Any]:
    """Return the model class and the patterns of ignored tensors of each family."""
    params, seen = [], set()
    for subject in subjects():
        if subject.model_type not in seen and subject.is_in_transformers:
            seen.add(subject.model_type)
            params.append(pytest.param(subject, id=subject.model_type))
    return params


#: Last parts of patterns that name a module and not a tensor.
MODULES = (*("mtp", "decoder", "position_embeddings"), *("k_proj", "v_proj", "k_norm", "v_norm"))
#: Pattern of a module at the top of the files -> a tensor of it.
TOP = {"mask_predictions.*": "mask_predictions.dense.weight"}


@pytest.mark.nightly
@pytest.mark.parametrize("subject", ignored_by_transformers())
def test_tensors_that_transformers_ignores_are_no_leftovers(subject: Any) -> None:
    patterns = subject.torch_model._keys_to_ignore_on_load_unexpected or ()
    weights = WeightMap(get_weight_rules(subject.module_class), {})
    for pattern in patterns:
        plain = re.sub(r"\\|\^|\$", "", pattern).replace(".*", ".weight")
        # A pattern fits anywhere in a name: `attn.bias` ignores `transformer.h.0.attn.bias`.
        name = plain if pattern.startswith(("^", "model")) else f"model.part.{plain}"
        name = TOP.get(pattern, name)
        if name.rpartition(".")[2] in MODULES:
            name += ".weight"
        files: Any = {name: None}
        assert not find_leftovers(weights, files), pattern
