"""Small objects of `import easydel as ed` whose form differs here: converters, quantizer, packing.

Each one calls the function of this project that does the same; nothing else imports this module.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import numpy as np
from ed_data import pack
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_layers.quantization.encoding import encode_matrix
from ed_models.auto import AutoEasyDeLConfig
from ed_models.base.module import EasyDeLBaseModule
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from datasets import Dataset
    from ed_layers.quantization.qarray import QArray
    from transformers import PreTrainedModel

ModuleT = TypeVar("ModuleT", bound=EasyDeLBaseModule)
#: Path of a parameter -> function of its array.
ArrayFunctions = Mapping[Any, Callable[[jax.Array], jax.Array]]


class StateDictConverter:
    """Converts the parameters of a model to a state dictionary of torch.

    `from_pretrained` reads the other direction.
    """

    @staticmethod
    def easydel_to_torch(
        module: EasyDeLBaseModule, dtype: DTypeLike | None = None
    ) -> dict[str, Any]:
        """Return the tensors under the names of `transformers`.

        Args:
            module: a model.
            dtype: dtype of floating-point tensors; None = those of the parameters.
        """
        module = module if dtype is None else module.to_dtype(dtype)
        return module.to_torch().state_dict()


class ModelConverter:
    """Converts a model to a model of `transformers`."""

    @staticmethod
    def easydel_to_huggingface(
        module: EasyDeLBaseModule, dtype: DTypeLike | None = None
    ) -> PreTrainedModel:
        """Return `module.to_torch()`, with floating-point tensors of a dtype."""
        return (module if dtype is None else module.to_dtype(dtype)).to_torch()


class EasyQuantizer:
    """Quantizes models and arrays with a configuration.

    Args:
        quantization_config: the format; None leaves everything unchanged.
    """

    def __init__(self, quantization_config: EasyDeLQuantizationConfig | None = None) -> None:
        self.config = quantization_config

    @property
    def pattern(self) -> str | None:
        """Regular expression over the names of the quantized layers."""
        return None if self.config is None else self.config.pattern

    def __call__(
        self, array: jax.Array, path: str | Sequence[object] | None = None
    ) -> jax.Array | QArray:
        """Return a quantized matrix, or the array if its path does not match the pattern."""
        name = path if isinstance(path, str) or path is None else ".".join(map(str, path))
        if self.config is None or (name is not None and not re.search(self.config.pattern, name)):
            return array
        return self.quantize_array(array)

    def quantize_array(self, array: jax.Array, simulate: bool = False) -> jax.Array | QArray:
        """Return a quantized matrix [in, out]; with `simulate` a plain one with its values."""
        if self.config is None:
            return array
        codes = encode_matrix(self.config, array, rows=False, absorbed=False)
        return codes.dense() if simulate else codes

    def apply_quantization(
        self, model: ModuleT, quantization_pattern: str | None = None
    ) -> ModuleT:
        """Return the model with quantized layers, selected by the pattern."""
        if self.config is None:
            return model
        pattern = quantization_pattern or self.config.pattern
        return model.quantize([(pattern, self.config)])

    def dequantize_modules(self, model: ModuleT) -> ModuleT:
        """Return the model with plain matrices."""
        return model.dequantize()


class AutoShardAndGatherFunctions:
    """Makes the functions that place the parameters of a model on a mesh, and gather them."""

    @classmethod
    def from_config(
        cls,
        config: EasyDeLBaseConfig,
        partition_rules: object = None,
        flatten: bool = True,
        model_task: TaskType | str = TaskType.CAUSAL_LM,
    ) -> tuple[ArrayFunctions, ArrayFunctions]:
        """Return path -> function that shards, and path -> function that gathers.

        Args:
            config: the configuration of a model.
            partition_rules: (regular expression, PartitionSpec) pairs; None = the logical axes.
            flatten: whether a path is one tuple; otherwise the result is nested.
            model_task: the task of the model.
        """
        module = cast(Any, registry.get_module(model_task, config.model_type))
        model: EasyDeLBaseModule = module.lazy_init(config)
        both = model._shard_fns(partition_rules), model._gather_fns(partition_rules)
        if flatten:
            return both
        shard, gather = (_nest_paths(functions) for functions in both)
        return shard, gather

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str,
        *,
        partition_rules: object = None,
        flatten: bool = True,
        model_task: TaskType | str = TaskType.CAUSAL_LM,
        **options: object,
    ) -> tuple[ArrayFunctions, ArrayFunctions]:
        """Return the functions of a checkpoint; `options` are those of `AutoEasyDeLConfig`."""
        load = cast("Callable[..., EasyDeLBaseConfig]", AutoEasyDeLConfig.from_pretrained)
        config = load(pretrained_model_name_or_path, **options)
        return cls.from_config(config, partition_rules, flatten, model_task)


def _nest_paths(functions: ArrayFunctions) -> dict[Any, Any]:
    nested: dict[Any, Any] = {}
    for path, function in functions.items():
        inner = nested
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = function
    return nested


class Registry:
    """The registry of families of this process; all instances are the same registry."""

    register_config = staticmethod(registry.register_config)
    register_module = staticmethod(registry.register_module)
    get_config = staticmethod(registry.get_config)
    get_module_registration = staticmethod(registry.get_module_registration)


class Mistral3Tokenizer:
    """Gives a tokenizer of mistral-common the methods of one of transformers.

    Args:
        mistral_tokenizer: a `MistralTokenizer` of mistral-common.
    """

    padding_side = "left"

    def __init__(self, mistral_tokenizer: Any) -> None:
        self.mistral_tokenizer = mistral_tokenizer
        self.tokenizer = mistral_tokenizer.instruct_tokenizer.tokenizer
        self.pad_token_id: int = self.tokenizer.pad_id
        self.bos_token_id: int = self.tokenizer.bos_id
        self.eos_token_id: int = self.tokenizer.eos_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the tokens of its begin and end."""
        return self.tokenizer.encode(text, bos=add_special_tokens, eos=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        ids = [int(token) for token in token_ids]
        if skip_special_tokens:
            special = {self.pad_token_id, self.bos_token_id, self.eos_token_id}
            ids = [token for token in ids if token not in special]
        return self.mistral_tokenizer.decode(ids)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], tokenize: bool = True
    ) -> str | list[int]:
        """Return the ids of a chat, or its text."""
        request = pkgutil.resolve_name(
            "mistral_common.protocol.instruct.request:ChatCompletionRequest"
        )
        chat = self.mistral_tokenizer.encode_chat_completion(request(messages=list(conversation)))
        return chat.tokens if tokenize else chat.text

    def __call__(
        self,
        text: str | Sequence[str],
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        add_special_tokens: bool = True,
    ) -> dict[str, Any]:
        """Return `input_ids` and `attention_mask` of texts, padded on the left.

        Args:
            text: one text or several.
            padding: True or "longest" pads to the longest text, "max_length" to `max_length`.
            truncation: whether texts are cut at `max_length`.
            max_length: number of tokens.
            return_tensors: "np" returns arrays.
            add_special_tokens: whether to add the tokens of begin and end.
        """
        texts = [text] if isinstance(text, str) else list(text)
        rows = [self.encode(one, add_special_tokens) for one in texts]
        rows = [row[:max_length] for row in rows] if truncation else rows
        size = max_length if padding == "max_length" else max(map(len, rows), default=0)
        size = size if padding and size is not None else 0
        missing = [max(size - len(row), 0) for row in rows]
        pairs = list(zip(missing, rows, strict=True))
        result: dict[str, Any] = {
            "input_ids": [[self.pad_token_id] * count + row for count, row in pairs],
            "attention_mask": [[0] * count + [1] * len(row) for count, row in pairs],
        }
        if return_tensors == "np":
            return {name: np.asarray(values) for name, values in result.items()}
        if isinstance(text, str):
            return {name: values[0] for name, values in result.items()}
        return result


def pack_sequences(
    dataset: Dataset,
    max_length: int = 512,
    pad_token_id: int = 0,
    reset_position_ids: bool = False,
    num_proc: int | None = None,
) -> Dataset:
    """Return rows of a length that contain several sequences, each followed by a separator.

    Trainers pack rows themselves (`packing=True`), without separators.

    Args:
        dataset: a `datasets.Dataset` with `input_ids` and `attention_mask`.
        max_length: number of tokens of a row; longer sequences are cut.
        pad_token_id: id of separators and padding, whose `attention_mask` is 0.
        reset_position_ids: whether positions start at 0 in each sequence, otherwise in each row.
        num_proc: without effect: rows are planned in one pass.
    """
    ids, masks = list(dataset["input_ids"]), list(dataset["attention_mask"])
    plan = pack(np.asarray([len(one) + 1 for one in ids]), max_length, "greedy", truncate=True)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "position_ids": []}
    for start, stop in zip(plan.row_offsets[:-1], plan.row_offsets[1:], strict=True):
        row: tuple[list[int], list[int], list[int]] = ([], [], [])
        for document, length in zip(
            plan.document[start:stop], plan.length[start:stop], strict=True
        ):
            first = 0 if reset_position_ids else len(row[0])
            row[0].extend([*ids[document], pad_token_id][:length])
            row[1].extend([*masks[document], 0][:length])
            row[2].extend(range(first, first + int(length)))
        missing = max_length - len(row[0])
        for name, values, value in zip(rows, row, (pad_token_id, 0, 0), strict=True):
            rows[name].append(values + [value] * missing)
    return type(dataset).from_dict(rows)
