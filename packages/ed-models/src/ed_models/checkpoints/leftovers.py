"""Tensors of checkpoints that no model reads, and tensors that old checkpoints name in another way.

`transformers` loads a checkpoint with further tensors. Here a further tensor is an error, because
the configuration may be of another model, unless the tensor is of one of these kinds:

- a rule `ignore(...)` or `carry(...)` of the family names the tensor
- the tensor is a buffer that the configuration determines, such as `position_ids`
- the tensor belongs to layers that predict several tokens (MTP), which are not loaded
- the tensor belongs to a head of another task, and the model has no module of this name

Tensors whose values nothing else determines are copied when a model of the same task is saved
(`ed_models.checkpoints.carried`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from ed_infra.logging import get_logger, once

from ed_models.checkpoints.tensor_files import TensorFiles
from ed_models.checkpoints.weight_map import WeightMap

logger = get_logger(__name__)

#: Buffers that earlier releases of torch's models saved.
_BUFFERS = frozenset(
    {
        *("position_ids", "token_type_ids", "version", "masked_bias"),
        *("inv_freq", "original_inv_freq", "cos_cached", "sin_cached"),
    }
)
#: First parts of the names of heads, and of modules that only pretraining reads.
HEADS = frozenset(
    {
        # Classifiers of texts, tokens, images and sounds, and heads for answers.
        *("score", "classifier", "classification_head", "qa_outputs"),
        *("pre_classifier", "projector", "cls_classifier", "distillation_classifier"),
        *("multiple_choice_head", "v_head", "summary", "sequence_summary"),
        # Heads of the pretraining of encoders.
        *("cls", "predictions", "sop_classifier", "seq_relationship", "lm_predictions"),
        *("mask_predictions", "discriminator_predictions", "generator_predictions"),
        *("generator_lm_head", "vocab_transform", "vocab_layer_norm", "vocab_projector"),
        # The pretraining of speech encoders.
        *("quantizer", "project_q", "project_hid"),
        # The comparison of images with texts.
        *("visual_projection", "text_projection", "logit_scale", "logit_bias"),
    }
)
#: Modules that only a layer for the prediction of further tokens has.
_MTP_MODULES = frozenset({"eh_proj", "enorm", "hnorm", "shared_head", "nextn"})
#: The first number in a name is that of a layer.
_LAYER = re.compile(r"\D*\.\d+(?=\.)")


def rename_legacy_tensors(files: TensorFiles, model_tensors: Collection[str]) -> TensorFiles:
    """Return the files with the present names of norms and of normalized weights.

    `transformers` renames these tensors in every checkpoint.
    """
    names = {
        name: renamed
        for name in files
        if name not in model_tensors and (renamed := _rename_legacy(name)) != name
    }
    return (
        files.rename_tensors({n: to for n, to in names.items() if to not in files})
        if names
        else files
    )


def _rename_legacy(name: str) -> str:
    parent, _, last = name.rpartition(".")
    if parent.endswith("LayerNorm"):
        last = {"gamma": "weight", "beta": "bias"}.get(last, last)
    weight_norm = {"weight_g": "original0", "weight_v": "original1"}
    if last in weight_norm:
        last = f"parametrizations.weight.{weight_norm[last]}"
    return f"{parent}.{last}" if parent else last


def find_leftovers(weights: WeightMap, files: TensorFiles) -> list[str]:
    """Return the tensors of a checkpoint that the model lacks and that are not known as needless.

    Tensors of heads of other tasks are logged once.
    """
    unknown = [n for n in files if n not in weights.hf_shapes and not is_known(weights, n)]
    unknown = _without_mtp(weights.hf_shapes, unknown)
    heads = HEADS - {name.partition(".")[0] for name in weights.hf_shapes}
    head_tensors = [name for name in unknown if name.partition(".")[0] in heads]
    if head_tensors:
        once(
            logger,
            f"{files.directory}: {len(head_tensors)} tensors of other tasks ({min(head_tensors)}, "
            "…) are "
            "not read",
        )
    return [name for name in unknown if name.partition(".")[0] not in heads]


def is_known(weights: WeightMap, name: str) -> bool:
    """Return whether a rule ignores a tensor, or the tensor is a buffer without information."""
    return name.rpartition(".")[2] in _BUFFERS or weights.ignores(name)


def is_copied(weights: WeightMap, name: str) -> bool:
    """Return whether a tensor that the model lacks has values that nothing else determines."""
    return weights.copies(name) or not is_known(weights, name)


def _without_mtp(model_tensors: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names outside of the modules that predict further tokens.

    Such a module is called `mtp…`, or is a layer after those of the model with a module that only
    these layers have. A plain further layer is a sign of a wrong `num_hidden_layers`.
    """
    model_layers = {match[0] for name in model_tensors if (match := _LAYER.match(name))}
    further_layers: dict[str, list[str]] = defaultdict(list)
    unknown: list[str] = []
    for name in names:
        match = _LAYER.match(name)
        if any(part.startswith("mtp") for part in name.split(".")):
            continue
        if match and match[0] not in model_layers:
            further_layers[match[0]].append(name)
        else:
            unknown.append(name)
    for layer_names in further_layers.values():
        if not any(_MTP_MODULES & {*name.split(".")} for name in layer_names):
            unknown += layer_names
    return unknown
