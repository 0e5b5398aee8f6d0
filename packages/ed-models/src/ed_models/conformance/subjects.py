"""Subjects of the conformance suite: tiny configurations of families, with random weights.

Legend: b rows, s positions, t encoder positions, v vocabulary, d hidden.
"""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.testing import require_torch
from flax import nnx

from ed_models.base.export import TORCH_CLASSES
from ed_models.checkpoints import hub
from ed_models.checkpoints.task_rules import get_weight_rules
from ed_models.checkpoints.weight_map import WeightMap

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Fields of every tiny configuration. A case replaces fields; None removes one of these fields, and
#: is the value of any other field.
TINY: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

ONE = (1, 1, 1, 1, 1)
B, S = 4, 24
PAD = (0, 5, 0, 17)  # padding on the left of each row
_LENGTHS = (11, 20, 14)  # of the documents of a packed row


@dataclass(frozen=True)
class Cases:
    """Tiny configurations of one family, for the features of the family.

    Attributes:
        rows: name of a configuration -> the fields that differ from `TINY`.
        logits: bound on the difference of float32 logits from Hugging Face's; 2e-4 if a scan
            reorders sums.
        ours: bound on the difference of float32 logits of two programs of this project; larger if
            random weights amplify rounding errors.
        gradients: bound on the error of float32 gradients, relative to the largest entry of each
            parameter.
        saved: bound on the difference of torch's outputs before and after saving, if torch's
            products of equal matrices depend on their places in memory.
        padded_in_transformers: whether Hugging Face's model computes equal numbers for a row with
            and without padding. False if a bias turns padding into input of a recurrence; rows are
            then compared without padding.
        tasks: the tasks that are checked; empty = the first registered task of the family.
        image_features: number of features of an image, or of a tile of an image; at most 4.
        tiny: whether the fields of `TINY` are part of each row.
        exact_reference: whether Hugging Face's model computes the reference of `parity` in float64.
            Scores without a scale amplify rounding, and then only that of this project counts.
    """

    rows: Mapping[str, Mapping[str, Any]]
    logits: float = 1e-4
    ours: float = 2e-5
    gradients: float = 1e-4
    saved: float = 0.0
    padded_in_transformers: bool = True
    tasks: tuple[TaskType, ...] = ()
    tiny: bool = True
    image_features: int = 4
    exact_reference: bool = False


class Subject:
    """One tiny configuration of a causal language model, its weights, and its reference outputs.

    Attributes:
        model_type: model type of the family.
        row: name of the configuration, and of the task if several tasks are checked.
        module_class: class of the model.
        ids: token ids, int32 [b, s]. mask: rows padded on the left, int32 [b, s].
        checks: names of the checks for the task.
        pad: number of padding tokens of each row.
        zero_gradient: bound on gradients that are zero in exact arithmetic, in rounding errors of
            the largest gradient.
        saved_bound: bound on the difference of outputs after saving.
        page_counts: number of tokens of each row in each step over pages.
        prompt_length: number of tokens of the prompts of these steps.
    """

    checks: ClassVar[tuple[str, ...]] = (
        *("parity", "gradients", "generation", "saved", "cache", "pages"),
        *("packed", "padding", "layouts", "meshes"),
    )
    task: ClassVar[TaskType] = TaskType.CAUSAL_LM
    pad: ClassVar[tuple[int, ...]] = PAD
    zero_gradient: ClassVar[float] = 1.0
    saved_bound: float = 0.0
    page_counts: tuple[tuple[int, ...], ...] = ((9, 1, 4, 3), (1, 12, 20, 1), (14, 11, 0, 20))
    prompt_length: int = S

    def __init__(self, model_type: str, row: str, module_class: type[Any], cases: Cases):
        row_name = f"{row} ({self.task})" if len(cases.tasks) > 1 else row
        self.model_type, self.row, self.module_class = model_type, row_name, module_class
        self.bound, self.cases = cases.logits, cases
        self.saved_bound = max(cases.saved, type(self).saved_bound)
        row_fields = cases.rows[row]
        fields = {**TINY, **row_fields} if cases.tiny else dict(row_fields)
        left_out = {name for name in TINY if fields.get(name, ...) is None and cases.tiny}
        self.fields = {name: value for name, value in fields.items() if name not in left_out}
        rng = np.random.default_rng(0)
        self.ids = rng.integers(3, self.vocab_size, (B, S)).astype(np.int32)
        self.mask = np.stack([np.arange(S) >= pad for pad in self.pad]).astype(np.int32)

    def __str__(self) -> str:
        return f"{self.model_type}: {self.row}"

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.fields["vocab_size"]

    # Weights.

    @functools.cached_property
    def torch_model(self) -> Any:
        """Hugging Face's model with random float32 weights, including norms and biases."""
        torch = require_torch()
        import transformers

        config = transformers.AutoConfig.for_model(self.model_type, **self.fields)
        torch.manual_seed(0)
        model = self.torch_class.from_config(config).float().eval()
        if self.fields.get("tie_word_embeddings") is False and is_tied(model):
            # `transformers` ties the head of T5 in memory even if checkpoints have two matrices.
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        with torch.no_grad():
            for name, value in model.named_parameters():
                if not value.requires_grad:  # computed positions
                    continue
                parameter_name = ".".join(name.split(".")[-2:])
                # The factors of norms stay near their initial value: 1, or 0 if the norm adds one.
                # Factors twice as large would amplify rounding errors.
                factors = ("norm" in parameter_name.lower() or value.ndim == 1) and name.endswith(
                    "weight"
                )
                value.normal_(float(value.mean().round()) if factors else 0.0, 0.2)
            saved = model.state_dict()
            for name, value in model.named_buffers():  # biases that choose experts
                if name in saved and value.is_floating_point() and not self.ignores(name):
                    value.normal_(0.0, 0.2)
        return model

    @property
    def torch_class(self) -> Any:
        """The auto class of `transformers` for the task."""
        import transformers

        return getattr(transformers, TORCH_CLASSES[self.task])

    def ignores(self, name: str) -> bool:
        """Return whether the rules of the family ignore a tensor of a checkpoint."""
        return WeightMap(get_weight_rules(self.module_class), {}).ignores(name)

    @functools.cached_property
    def directory(self) -> Path:
        """Checkpoint saved by Hugging Face, or by this project for other model types."""
        folder = Path(self._folder.name)
        if self.is_in_transformers:
            self.torch_model.save_pretrained(folder)
            return folder
        config = registry.get_config(self.model_type)(**self.fields, sharding_axis_dims=ONE)
        self.module_class.create(config, seed=0).save_pretrained(folder)
        return folder

    @functools.cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory()

    @property
    def is_in_transformers(self) -> bool:
        """Whether `transformers` has a model of the task and model type.

        Without torch, `transformers` lists no models, and a known model type is enough.
        """
        from transformers import CONFIG_MAPPING
        from transformers.utils import is_torch_available

        if self.model_type not in CONFIG_MAPPING or not is_torch_available():
            return self.model_type in CONFIG_MAPPING
        return CONFIG_MAPPING[self.model_type] in self.torch_class._model_mapping

    def load(self, dims: tuple[int, ...] = ONE, **config_kwargs: object) -> Any:
        """Load the checkpoint as a model of this project."""
        return hub.from_pretrained(
            self.directory,
            self.module_class,
            sharding_axis_dims=dims,
            config_kwargs=config_kwargs,
        )

    @functools.cached_property
    def model(self) -> Any:
        """The model on one device, in the layout of the configuration."""
        return self.load()

    # Inputs of this project's model.

    def inputs(self, rows: slice = slice(None), at: slice = slice(None)) -> dict[str, Any]:
        """Return the arguments of `decode` for some positions of some rows."""
        return {"input_ids": self.ids[rows, at]}

    def flat(self, at: np.ndarray) -> dict[str, Any]:
        """Return the arguments of `decode` for positions of all rows in one row; -1 = padding."""
        return {"input_ids": np.where(at < 0, 0, self.ids.reshape(-1)[at])[None]}

    def step(self, at: np.ndarray) -> dict[str, Any]:
        """Return the arguments of `decode` for a flat batch of positions; -1 = padding."""
        return self.flat(at)

    def paged_cache(self, num_pages: int, page_size: int) -> Any:
        """Return a cache of pages, in which row i has state slot i."""
        return self.model.init_paged_cache(num_pages, page_size, num_states=B)

    @property
    def encoder_length(self) -> int | None:
        """Number of encoder positions; None without cross-attention."""
        return None

    def build_full_inputs(self) -> dict[str, Any]:
        """Return the arguments of a call with rows without padding."""
        return self.inputs()

    def build_padded_inputs(self) -> dict[str, Any]:
        """Return the arguments of a call with padded rows."""
        return {**self.build_full_inputs(), "attention_mask": self.mask}

    def build_row_inputs(self, row: int) -> dict[str, Any]:
        """Return the arguments of a call with one row without its padding."""
        return self.inputs(slice(row, row + 1), slice(self.pad[row], None))

    def documents(self) -> tuple[dict[str, Any], list[tuple[np.ndarray, dict[str, Any]]]]:
        """Return the arguments of a packed row, and of each document alone with its positions."""
        ends = np.cumsum([0, *_LENGTHS])
        segments = np.repeat([1, 2, 3, 0], [*_LENGTHS, 48 - ends[-1]])[None].astype(np.int32)
        parts = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
        packed = {**self.flat(np.arange(48)), "segment_ids": segments}
        return packed, [(at, self.flat(at)) for at in parts]

    def prompts(self) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        return {"input_ids": self.ids, "attention_mask": self.mask}

    def training(self) -> dict[str, Any]:
        """Return the arguments of `compute_loss`."""
        return self.build_full_inputs()

    # Outputs.

    def output(self, result: Any) -> Any:
        """Return the compared output of a call, of this project or of Hugging Face."""
        return result.logits

    @property
    def real(self) -> np.ndarray:
        """Mask of the compared outputs of padded rows."""
        return self.mask != 0

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """Outputs of rows without padding, [b, s, v]."""
        return np.asarray(self.output(forward(self.model, **self.build_full_inputs())))

    # Hugging Face's model.

    @functools.cached_property
    def torch_logits(self) -> np.ndarray:
        """Hugging Face's outputs of padded rows."""
        return self.torch_outputs(self.torch_model)

    @property
    def reference_logits(self) -> np.ndarray:
        """Hugging Face's outputs of padded rows; see `Cases.exact_reference`."""
        if not self.cases.exact_reference:
            return self.torch_logits
        return self.torch_outputs(copy.deepcopy(self.torch_model).double())

    def torch_outputs(self, model: PreTrainedModel) -> np.ndarray:
        """Return the outputs of a torch model, [b, s, v]; zeros for omitted positions."""
        parts = []
        for inputs in self.torch_inputs():
            positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
            with require_torch().no_grad():
                result = model(**inputs, position_ids=positions, use_cache=False)
            out = self.output(result).float().numpy()
            parts.append(np.pad(out, ((0, 0), (S - out.shape[1], 0), (0, 0))))
        return np.concatenate(parts)

    def torch_inputs(self) -> list[dict[str, Any]]:
        """Return the rows for Hugging Face's model: together, or each without its padding."""
        torch, rows = require_torch(), [(slice(None), 0)]
        if not self.cases.padded_in_transformers:
            rows = [(slice(row, row + 1), pad) for row, pad in enumerate(self.pad)]
        return [
            {
                "input_ids": torch.tensor(self.ids[row, pad:], dtype=torch.long),
                "attention_mask": torch.tensor(self.mask[row, pad:]),
            }
            for row, pad in rows
        ]

    def torch_prompts(self) -> list[dict[str, Any]]:
        """Return the arguments of Hugging Face's `generate`."""
        return self.torch_inputs()

    def torch_loss(self) -> Any:
        """Return Hugging Face's loss of rows without padding."""
        torch = require_torch()
        ids = torch.tensor(self.ids, dtype=torch.long)
        return self.torch_model(input_ids=ids, labels=ids, use_cache=False).loss


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether a torch model has one matrix for its head and its token embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def forward(model: object, method: str = "__call__", **inputs: object) -> Any:
    """Call a method of a model jitted, with flat leaves and a closed-over graphdef."""
    graphdef, state = nnx.split(model)
    return _program(graphdef, method)(state, inputs)


@functools.lru_cache(maxsize=4)
def _program(graphdef: nnx.GraphDef[Any], method: str) -> Callable[..., Any]:
    """Return one function per model: a new function would be traced again."""
    return jax.jit(lambda state, inputs: getattr(nnx.merge(graphdef, state), method)(**inputs))
