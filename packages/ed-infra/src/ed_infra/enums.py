"""Names that configurations choose from. This module imports neither jax nor transformers.

Every enum is a string enum: a member equals, hashes, prints and serializes as its value.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, Self

from ed_infra.errors import unknown_name


class TaskType(StrEnum):
    """The task of a module; the first half of a registry key."""

    CAUSAL_LM = "causal-language-model"
    VISION_LM = "vision-language-model"
    DIFFUSION_LM = "diffusion-language-model"
    IMAGE_TEXT_TO_TEXT = "image-text-to-text"
    BASE_MODULE = "base-module"
    BASE_VISION = "vision-module"
    SEQUENCE_TO_SEQUENCE = "sequence-to-sequence"
    SPEECH_SEQUENCE_TO_SEQUENCE = "speech-sequence-to-sequence"
    CTC = "ctc"
    ZERO_SHOT_IMAGE_CLASSIFICATION = "zero-shot-image-classification"
    MASKED_LM = "masked-language-model"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    MULTIPLE_CHOICE = "multiple-choice"
    AUDIO_CLASSIFICATION = "audio-classification"
    IMAGE_CLASSIFICATION = "image-classification"
    EMBEDDING = "embedding"
    ANY_TO_ANY = "any-to-any"
    AUTO_BIND = "auto-bind"


#: Other spellings of tasks, in lower case with `-` instead of `_`.
TASK_ALIASES: dict[str, str] = {
    "causal-lm": "causal-language-model",
    "lm": "causal-language-model",
    "masked-lm": "masked-language-model",
    "text-generation": "causal-language-model",
    "fill-mask": "masked-language-model",
    "vision-language-model": "image-text-to-text",
    "vision-lm": "image-text-to-text",
    "vlm": "image-text-to-text",
    "diffusion-lm": "diffusion-language-model",
    "base": "base-module",
    "vision": "vision-module",
    "seq2seq": "sequence-to-sequence",
    "seq2seq-lm": "sequence-to-sequence",
    "text2text-generation": "sequence-to-sequence",
    "text-classification": "sequence-classification",
    "feature-extraction": "embedding",
    "sentence-similarity": "embedding",
    "speech-seq2seq": "speech-sequence-to-sequence",
    "auto": "auto-bind",
}


#: Activations by Hugging Face's names; `ed_layers.activations` implements them.
ACTIVATION_NAMES = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "leaky_relu", "linear", "mish", "quick_gelu", "relu",
    "relu2", "relu6", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip


class EasyDeLBackends(StrEnum):
    """Names of jax backends."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


class EasyDeLPlatforms(StrEnum):
    """Languages of kernels."""

    JAX = "jax"
    TRITON = "triton"
    PALLAS = "pallas"


class EasyDeLGradientCheckPointers(StrEnum):
    """Policies for values that are stored for the backward pass instead of recomputed."""

    NONE = ""
    EVERYTHING_SAVEABLE = "everything_saveable"
    NOTHING_SAVEABLE = "nothing_saveable"
    CHECKPOINT_DOTS = "checkpoint_dots"
    CHECKPOINT_DOTS_WITH_NO_BATCH_DIMS = "checkpoint_dots_with_no_batch_dims"
    DOTS_SAVEABLE = "dots_saveable"
    DOTS_WITH_NO_BATCH_DIMS_SAVEABLE = "dots_with_no_batch_dims_saveable"
    SAVE_ANYTHING_EXCEPT_THESE_NAMES = "save_anything_except_these_names"
    SAVE_ANY_NAMES_BUT_THESE = "save_any_names_but_these"
    SAVE_ONLY_THESE_NAMES = "save_only_these_names"
    SAVE_FROM_BOTH_POLICIES = "save_from_both_policies"
    MLP_NOTSAVEABLE = "mlp_notsaveable"
    ATTN_NOTSAVEABLE = "attn_notsaveable"
    MLP_ATTN_NOTSAVEABLE = "mlp_attn_notsaveable"
    OFFLOAD_DOT_WITH_NO_BATCH_DIMS = "offload_dot_with_no_batch_dims"
    SAVE_AND_OFFLOAD_ONLY_THESE_NAMES = "save_and_offload_only_these_names"


@dataclasses.dataclass(frozen=True)
class EasyMethod:
    """Names of the workflows of a configuration (`easy_method`).

    `EasyMethod.SERVE` is `"serve"`; `replace` creates an object with other names.
    """

    TRAIN: str = "train"
    SERVE: str = "serve"
    EVAL: str = "serve"
    CONVERT: str = "convert"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Create the object from a mapping of its fields.

        Raises:
            ConfigError: A key is not a field.
        """
        field_names = [field.name for field in dataclasses.fields(cls)]
        for name in data:
            if name not in field_names:
                raise unknown_name("field of EasyMethod", name, field_names)
        return cls(**data)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """Create the object from the JSON of `to_json`."""
        return cls.from_dict(json.loads(json_str))

    def replace(self, **kwargs: str) -> Self:
        """Return a copy with some fields changed."""
        return self.from_dict({**self.to_dict(), **kwargs})

    def to_dict(self) -> dict[str, str]:
        """Return the fields as a mapping."""
        return dataclasses.asdict(self)

    def to_json(self, **kwargs: Any) -> str:
        """Return the fields as JSON; `kwargs` as in `json.dumps`."""
        return json.dumps(self.to_dict(), **kwargs)


AVAILABLE_ATTENTION_MECHANISMS = Literal[
    "auto",
    "vanilla",
    "flash_attn2",
    "blocksparse",
    "ring",
    "cudnn",
    "blockwise",
    "sdpa",
    "autoregressive_decodeattn",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "page_attention",
]

#: Other spellings of attention mechanisms.
MECHANISM_ALIASES: dict[str, str] = {
    "flash": "flash_attn2",
    "flash_attention": "flash_attn2",
    "flash_attention_2": "flash_attn2",
    "cuda_flash_attn2": "cudnn",
    "splash": "blocksparse",
    "standard": "vanilla",
    "eager": "vanilla",
}


class AttentionMechanisms(StrEnum):
    """EasyDeL's names of the attention mechanisms."""

    AUTO = "auto"
    VANILLA = "vanilla"
    FLASH_ATTN2 = "flash_attn2"
    BLOCKSPARSE = "blocksparse"
    SPLASH = "blocksparse"
    RING = "ring"
    CUDNN = "cudnn"
    CUDA_FLASH_ATTN2 = "cudnn"
    BLOCKWISE = "blockwise"
    SDPA = "sdpa"
    REGRESSIVE_DECODE = "autoregressive_decodeattn"
    RAGGED_PAGE_ATTENTION_V2 = "ragged_page_attention_v2"
    RAGGED_PAGE_ATTENTION_V3 = "ragged_page_attention_v3"
    PAGED_ATTENTION = "page_attention"


AVAILABLE_MOE_METHODS = Literal["fused_moe", "standard_moe", "dense_moe"]


class MoEMethods(StrEnum):
    """EasyDeL's names of the methods that compute experts."""

    FUSED_MOE = "fused_moe"
    STANDARD_MOE = "standard_moe"
    DENSE_MOE = "dense_moe"


class QuantizationType(StrEnum):
    """EasyDeL's names of the formats of weights that this project has."""

    NF4 = "nf4"
    INT8 = "int8"
    INT4 = "int4"
    AFFINE = "affine"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"


class ConfigType(StrEnum):
    """EasyDeL's kinds of registered configurations; the registry has one kind."""

    MODULE_CONFIG = "module-config"


#: Other spellings of MoE methods.
MOE_METHOD_ALIASES: dict[str, str] = {"einsum": "standard_moe"}

AVAILABLE_GRADIENT_CHECKPOINT_TARGETS = Literal[
    "attn_dense",
    "attn_key",
    "attn_key_value",
    "attn_output",
    "attn_qkv",
    "attn_query",
    "attn_receptance",
    "attn_value",
    "attn_weights",
    "embeddings",
    "layer_output",
    "lm_head_output",
    "mlp_down",
    "mlp_gate",
    "mlp_output",
    "mlp_up",
    "model_output",
    "moe_expert_output",
    "moe_gate_logits",
    "moe_output",
    "moe_router_logits",
    "normed_input",
    "residual",
]

AVAILABLE_QUANTIZATION_DTYPES = Literal["nf4", "int8", "int4", "fp8", "mxfp8"]


def canonical_task(task: str | TaskType) -> TaskType:
    """Return the task of a spelling (`"causal_lm"`, `"lm"`, `TaskType.CAUSAL_LM`, ...).

    EasyDeL's `TaskType.VISION_LM` is another name of `TaskType.IMAGE_TEXT_TO_TEXT`.

    Raises:
        ConfigError: The spelling is unknown; the message names the nearest task.
    """
    spelling = str(task).lower().replace("_", "-")
    spelling = TASK_ALIASES.get(spelling, spelling)
    try:
        return TaskType(spelling)
    except ValueError:
        raise unknown_name("task", task, [*[t.value for t in TaskType], *TASK_ALIASES]) from None
