"""The names and the order of axes in folders that EasyDeL saves, as a table of weight rules.

EasyDeL names a matrix `kernel` and stores it as [inputs, outputs]. The rules relate its arrays to
the tensors of Hugging Face's layout in both directions, as the rules of a family relate parameters
to these tensors (`ed_models.weights.rules`): a folder is read as Hugging Face's tensors, and the
rules of the family do the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from ed_infra.errors import ConfigError, unknown_name

from ed_models.weights.blocks import ArchitectureFields, Relation, Shape, Shapes, TheirName
from ed_models.weights.rules import Rule, equal, interleave, permute, renamer, stack


def _kernel(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
    """Relate [d] to [d], [inputs, outputs] to [outputs, inputs], and the kernel of a convolution
    [positions…, inputs, outputs] to [outputs, inputs, positions…]."""
    ((name, shape),) = ours.items()
    if not shape:
        raise ConfigError(f"{name} has no axis, and a kernel has at least one")
    layout = equal if len(shape) == 1 else permute(*range(2, len(shape)), 1, 0)
    return layout(ours, hf, config)


def _expert_kernels(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
    """Relate [experts, inputs, outputs] to a tensor [outputs, inputs] of each expert."""
    ((name, shape),) = ours.items()
    if len(shape) != 3:
        raise ConfigError(f"{name} has the shape {list(shape)}, not [experts, inputs, outputs]")
    return stack()(ours, hf, config)


_COMMON: tuple[Rule, ...] = (
    Rule("{path}.experts.{name}.kernel", "{path}.experts.{expert}.{name}.weight", _expert_kernels),
    Rule("{path}.kernel", "{path}.weight", _kernel),
    Rule("{path}.scale", "{path}.weight", equal),
    Rule("{path}.embedding", "{path}.weight", equal),
    # EasyDeL transposes each tensor with "weight" in its name, also those that no layer contains,
    # such as `in_proj_weight` and `mm_input_projection_weight`. Their names stay.
    Rule("{path}_weight", "{path}_weight", _kernel),
    Rule("{path}", "{path}", equal),
)
_GATE_UP = ("{path}.experts.gate_proj", "{path}.experts.up_proj")
#: Model type -> rules in front of the common ones.
_OF_FAMILIES: Mapping[str, tuple[Rule, ...]] = {
    "gpt_oss": (
        Rule(
            tuple(f"{name}.kernel" for name in _GATE_UP),
            "{path}.experts.gate_up_proj",
            interleave(-1, equal),
        ),
        Rule(
            tuple(f"{name}.bias" for name in _GATE_UP),
            "{path}.experts.gate_up_proj_bias",
            interleave(-1, equal),
        ),
        Rule("{path}.experts.down_proj.kernel", "{path}.experts.down_proj", equal),
        Rule("{path}.experts.down_proj.bias", "{path}.experts.down_proj_bias", equal),
    ),
}
#: First parts of the names of heads. With tied embeddings, EasyDeL saves an unused copy.
HEAD_MODULES = frozenset({"lm_head", "proj_out", "embed_out"})
#: Model type -> tensors of Hugging Face's layout that EasyDeL has no place for: zeros.
LOST_BIASES: Mapping[str, tuple[str, ...]] = {"gptj": ("lm_head.bias",)}
#: Families whose folders were compared with those of EasyDeL, name by name.
WRITTEN_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral"),
    *("qwen3_moe", "gpt2", "gpt_neox", "gptj", "mamba", "mamba2", "gpt_oss", "olmo2", "falcon"),
    *("opt", "qwen3_next", "whisper", "llava"),
)
#: Model type -> parts of our names of tensors -> parts of EasyDeL's.
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "llava": {
        "language_model.lm_head": "lm_head",
        "language_model.model": "model.language_model",
        "vision_tower": "model.vision_tower.vision_model",
        "multi_modal_projector": "model.multi_modal_projector",
    }
}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)\.weight")


def get_easydel_rules(model_type: str) -> Sequence[Rule]:
    """Return the rules from EasyDeL's arrays of a model type to Hugging Face's tensors."""
    return (*_OF_FAMILIES.get(model_type, ()), *_COMMON)


def rename_easydel_tensor(name: str, model_type: str) -> str:
    """Return the name from which EasyDeL's name of a tensor of Hugging Face's layout follows."""
    return renamer(_RENAMED.get(model_type, {}))(name)


def name_easydel_arrays(
    shapes: Shapes, embeddings: Collection[str], model_type: str
) -> dict[str, Shape]:
    """Return EasyDeL's arrays of the tensors of a model: name -> shape.

    Args:
        shapes: the tensors in Hugging Face's layout.
        embeddings: names of the tensors that are tables of embeddings.
        model_type: the family.

    Raises:
        ConfigError: The names of this family in EasyDeL's folders are not known.
    """
    if model_type not in WRITTEN_FAMILIES:
        raise unknown_name("family of EasyDeL's folders", model_type, WRITTEN_FAMILIES)
    arrays: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if name in LOST_BIASES.get(model_type, ()):
            continue
        if match := _EXPERT.fullmatch(name):
            kernel = f"{match[1]}.{match[3]}.kernel"
            count = max(arrays.get(kernel, (0,))[0], int(match[2]) + 1)
            arrays[kernel] = (count, *reversed(shape))
            continue
        fused = _split_experts(name, shape) if model_type == "gpt_oss" else {}
        if fused:
            arrays |= fused
            continue
        path, _, last = name.rpartition(".")
        if last != "weight":
            arrays[name] = shape
        elif name in embeddings or path.endswith("position_embedding"):
            arrays[f"{path}.embedding"] = shape
        elif len(shape) > 1:
            arrays[f"{path}.kernel"] = (*shape[2:], shape[1], shape[0])
        else:  # a norm with a bias is a layer norm, and the others are RMS norms
            arrays[f"{path}.{'scale' if f'{path}.bias' in shapes else 'kernel'}"] = shape
    return arrays


def _split_experts(name: str, shape: Shape) -> dict[str, Shape]:
    """Return the arrays of a tensor of all experts of gpt-oss; none for other tensors."""
    path, _, last = name.rpartition(".")
    if not path.endswith(".experts"):
        return {}
    kind = "bias" if last.endswith("_bias") else "kernel"
    module = last.removesuffix("_bias")
    if module == "down_proj":
        return {f"{path}.down_proj.{kind}": shape}
    half = (*shape[:-1], shape[-1] // 2)
    return {f"{path}.{part}.{kind}": half for part in ("gate_proj", "up_proj")}
