"""Tiny configurations of families, with random weights: what the conformance suite looks at.

Legend: b rows, s positions, v vocabulary.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.testing import require_torch
from flax import nnx

from ed_models.checkpoints import hub
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.tasks.causal_lm import CausalLM

#: Fields of every tiny configuration, where a row of `CONFORMANCE` does not change them. None in a
#: row leaves one of these fields out; for any other field it is the value.
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


class Subject:
    """One tiny configuration of one family, its weights, and what others say about them.

    Attributes:
        model_type: of the family.
        row: name of the configuration.
        module_class: the family's causal language model.
        ids: int32 [b, s]; mask: int32 [b, s], rows padded on the left.
    """

    def __init__(self, model_type: str, row: str, module_class: type[CausalLM]):
        self.model_type, self.row, self.module_class = model_type, row, module_class
        self.bound = module_class.LOGITS
        fields = {**TINY, **module_class.CONFORMANCE[row]}
        left_out = {name for name in TINY if fields[name] is None}
        self.fields = {name: value for name, value in fields.items() if name not in left_out}
        rng = np.random.default_rng(0)
        self.ids = rng.integers(3, self.fields["vocab_size"], (B, S)).astype(np.int32)
        self.mask = np.stack([np.arange(S) >= pad for pad in PAD]).astype(np.int32)

    def __str__(self) -> str:
        return f"{self.model_type}: {self.row}"

    @functools.cached_property
    def torch_model(self) -> Any:
        """Hugging Face's model with random weights, norms and biases too, float32."""
        torch = require_torch()
        import transformers

        config = transformers.AutoConfig.for_model(self.model_type, **self.fields)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for name, value in model.named_parameters():
                own = ".".join(name.split(".")[-2:])
                # Factors of norms, whatever their name, stay near what they begin with: 1, or 0
                # where one is added to them. Twice as large they would amplify rounding.
                factors = ("norm" in own or value.ndim == 1) and name.endswith("weight")
                value.normal_(float(value.mean().round()) if factors else 0.0, 0.2)
            saved = model.state_dict()
            for name, value in model.named_buffers():  # biases that choose experts
                if name in saved and value.is_floating_point() and not self.ignores(name):
                    value.normal_(0.0, 0.2)
        return model

    def ignores(self, name: str) -> bool:
        """Whether the family's table says that no model needs this tensor of a checkpoint."""
        return WeightMap(self.module_class.WEIGHTS, {}).ignores(name)

    @functools.cached_property
    def directory(self) -> Path:
        """Where Hugging Face saved its model; ours, where transformers does not know the type."""
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
        """Whether there is a model of Hugging Face's to compare with."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return self.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def load(self, dims: tuple[int, ...] = ONE, **config_kwargs: Any) -> CausalLM:
        """Load the weights as this project's model."""
        return hub.from_pretrained(
            self.directory,
            self.module_class,
            sharding_axis_dims=dims,
            config_kwargs=config_kwargs,
        )

    @functools.cached_property
    def model(self) -> CausalLM:
        """On one device, as the configuration stores its layers."""
        return self.load()

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """Of whole rows without padding, [b, s, v]."""
        return np.asarray(forward(self.model, input_ids=self.ids).logits)

    @functools.cached_property
    def torch_logits(self) -> np.ndarray:
        """Hugging Face's, of the padded rows."""
        return torch_logits(self, self.torch_model)

    def torch_inputs(self) -> list[dict[str, Any]]:
        """The rows for Hugging Face's model: together, or each without its padding."""
        torch, rows = require_torch(), [(slice(None), 0)]
        if not self.module_class.PADDED_IN_TRANSFORMERS:
            rows = [(slice(row, row + 1), pad) for row, pad in enumerate(PAD)]
        return [
            {
                "input_ids": torch.tensor(self.ids[row, pad:], dtype=torch.long),
                "attention_mask": torch.tensor(self.mask[row, pad:]),
            }
            for row, pad in rows
        ]


def subjects(*model_types: str) -> list[Subject]:
    """The rows of these model types; of all that are registered, if none is named.

    Raises:
        ValueError: a family lists no configuration.
    """
    rows: list[Subject] = []
    for model_type in model_types or registry.model_types():
        if TaskType.CAUSAL_LM not in registry.tasks_of(model_type):
            continue
        module_class = registry.get_module(TaskType.CAUSAL_LM, model_type)
        if not module_class.CONFORMANCE:
            raise ValueError(
                f"{module_class.__module__}.{module_class.__name__} lists no tiny configuration: "
                'add CONFORMANCE = {"what is special": {field: value}}'
            )
        rows += [Subject(model_type, row, module_class) for row in module_class.CONFORMANCE]
    return rows


def forward(model: CausalLM, **inputs: Any) -> Any:
    """Call a model jitted, the way every consumer does: flat leaves, graphdef closed over."""
    graphdef, state = nnx.split(model)
    return _program(graphdef)(state, inputs)


@functools.lru_cache(maxsize=4)
def _program(graphdef: nnx.GraphDef[CausalLM]) -> Callable[..., Any]:
    """One for all calls of a model: a new function would be traced again."""
    return jax.jit(lambda state, inputs: nnx.merge(graphdef, state)(**inputs))


def torch_logits(subject: Subject, model: Any) -> np.ndarray:
    """What a torch model says about the rows of a subject, [b, s, v]; zeros in what it left out."""
    parts = []
    for inputs in subject.torch_inputs():
        positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        with require_torch().no_grad():
            out = model(**inputs, position_ids=positions, use_cache=False).logits.float().numpy()
        parts.append(np.pad(out, ((0, 0), (S - out.shape[1], 0), (0, 0))))
    return np.concatenate(parts)
