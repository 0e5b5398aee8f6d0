"""Compare a family with `transformers` in configurations that change one choice of a small one.

A draft can have the logits of its two small configurations and be wrong in others: null as
`sliding_window`, layers of other types, a field without effect so far. Each variant changes one
choice. A family agrees with a variant if its logits agree, or if it refuses the changed field.

    uv run python -m tools.new_family.variants exaone4 ministral3

compares families that exist.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.testing import require_torch
from ed_models.conformance import Cases, Subject, forward

from tools.new_family.tiny import list_fields

#: Largest difference of float32 logits that counts as agreement.
BOUND = 1e-4
#: Types of layers -> the other type.
LAYER_TYPES = {
    "full_attention": "sliding_attention",
    "sliding_attention": "full_attention",
}
WINDOWS = ("sliding_window", "attention_window", "window_size")
#: Lists that a configuration computes if they are null.
COMPUTED = ("layer_types", "mlp_layer_types", "layer_rope_theta", "attention_types")
#: Parts of the names of numbers that are no factors of the outputs.
NO_FACTORS = (
    *("drop", "prob", "range", "coef", "std", "theta", "loss", "jitter", "noise"),
    *("initializer", "token"),
)
#: Positions that a scaled rotary table was trained with; less than the text has.
TRAINED = 8


@dataclass(frozen=True)
class Variant:
    """A configuration that changes one choice of a small one.

    Attributes:
        name: the change. fields: all fields of the configuration.
        changed: names of the changed fields.
        is_optional: whether the change has no effect on most types: the family is compared only if
            the change has an effect in `transformers`, or if the family reads the field.
    """

    name: str
    fields: dict[str, Any]
    changed: tuple[str, ...]
    is_optional: bool = False


class Sample(Subject):
    """A small model of `transformers`, whose family need not exist.

    Args:
        model_type: the type. row: name of the configuration.
        cases: the configurations; without the fields of `TINY` if `Cases.tiny` is False.
    """

    def __init__(self, model_type: str, row: str, cases: Cases):
        super().__init__(model_type, row, object, cases)

    def ignores(self, name: str) -> bool:
        """Return False: a draft ignores no tensor."""
        return False

    def compare(self, module_class: type[Any]) -> float:
        """Return the largest difference of the logits of a draft from those of the model."""
        from ed_models.checkpoints import hub

        model: Any = hub.from_pretrained(
            self.directory, module_class, sharding_axis_dims=(1, 1, 1, 1, 1)
        )
        ours = np.asarray(forward(model, **self.build_padded_inputs()).logits)
        return float(np.abs(ours - self.reference_logits)[self.real].max())

    def torch_outputs(self, model: Any) -> np.ndarray:
        """Return the outputs of a torch model; null as window is a layer without a window.

        Most types of `transformers` create masks of windows even for models without windows, and
        raise an error if the window is null.
        """
        module, name = sys.modules[type(model).__module__], "create_sliding_window_causal_mask"
        function = getattr(module, name, None)
        if function is None or getattr(model.config, "sliding_window", 0) is not None:
            return super().torch_outputs(model)
        from transformers.masking_utils import create_causal_mask

        setattr(module, name, create_causal_mask)
        try:
            return super().torch_outputs(model)
        finally:
            setattr(module, name, function)


def list_variants(model_type: str, fields: Mapping[str, Any]) -> list[Variant]:
    """Return the variants of a small configuration.

    Args:
        model_type: a type of `transformers`.
        fields: all fields of the small configuration.
    """
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    known, config = list_fields(config_class), config_class(**fields)
    shared = _list_shared_fields()
    variants: list[Variant] = []

    def add(name: str, changes: Mapping[str, Any], *, is_optional: bool = False) -> None:
        variant = Variant(name, {**fields, **changes}, tuple(changes), is_optional)
        variants.append(variant)

    for name in WINDOWS:
        if name in known:
            add(f"{name}=None", {name: None})
            add(f"{name}=3", {name: 3})
    types = fields.get("layer_types") or ()
    if "layer_types" in known and types and set(types) <= LAYER_TYPES.keys():
        full = ["full_attention"] * len(types)
        add("other layers have windows", {"layer_types": [LAYER_TYPES[kind] for kind in types]})
        add("no layer has a window", {"layer_types": full})
        add("all layers have windows", {"layer_types": ["sliding_attention"] * len(types)})
        if "sliding_window" in known:
            add("no layer has a window, null", {"layer_types": full, "sliding_window": None})
    for name in COMPUTED:
        if fields.get(name) is not None:
            add(f"{name}=None", {name: None})
            if "sliding_window" in known and name == "layer_types":
                add("sliding_window and layer_types=None", {"sliding_window": None, name: None})
    for name, annotation in known.items():
        value, kind = getattr(config, name, None), _read_annotation(annotation)
        if name in shared or "token_id" in name or name in WINDOWS:
            continue
        if isinstance(value, bool) or (value is None and kind & {"bool"}):
            add(f"{name}={not value}", {name: not value}, is_optional=True)
        elif "None" in kind and isinstance(value, int | float):
            add(f"{name}=None", {name: None}, is_optional=True)
        elif value is None and kind <= {"int", "float", "None"}:
            number = 0.5 if "float" in kind else 8
            add(f"{name}={number}", {name: number}, is_optional=True)
        if isinstance(value, int) and {"int", "list[int]"} <= kind:
            numbers = [value] * config.num_hidden_layers
            add(f"{name}={numbers}", {name: numbers})
        if "shared" in name and isinstance(value, int) and not isinstance(value, bool) and value:
            add(f"{name}=0", {name: 0})
    if "num_key_value_heads" in known:
        heads = config.num_attention_heads
        other = 1 if config.num_key_value_heads == heads else heads
        add(f"num_key_value_heads={other}", {"num_key_value_heads": other})
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if name in known:
            add(f"{name}=2", {name: 2})
    factors = dict(_change_factors(config, known.keys() - shared))
    if factors:
        add("other factors", factors)
    trained = _shorten_training(getattr(config, "rope_parameters", None))
    if trained is not None:
        add(f"original_max_position_embeddings={TRAINED}", {"rope_parameters": trained})
    return variants


@functools.cache
def _list_shared_fields() -> frozenset[str]:
    """Return the fields that all configurations have, and those without an effect on logits."""
    from transformers import PreTrainedConfig

    return frozenset({*PreTrainedConfig.__dataclass_fields__, "use_cache"})


def _read_annotation(annotation: Any) -> set[str]:
    """Return the names of the types of an annotation such as `int | None`."""
    text = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
    return {part.strip() for part in (text or str(annotation)).split("|")}


def _change_factors(config: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Return other values of all floating-point fields that may be factors."""
    for name in sorted(names):
        value = getattr(config, name, None)
        if isinstance(value, float) and value and not any(part in name for part in NO_FACTORS):
            yield name, 0.01 if "eps" in name else 1.25 * value


def _shorten_training(parameters: Any) -> Any:
    """Return rotary parameters with a short training length; None if they have none."""
    if not isinstance(parameters, Mapping):
        return None
    if parameters.get("original_max_position_embeddings"):
        return {**parameters, "original_max_position_embeddings": TRAINED}
    inner = {name: _shorten_training(value) for name, value in parameters.items()}
    if not any(inner.values()):
        return None
    return {name: inner[name] or value for name, value in parameters.items()}


def find_faults(
    model_type: str, module_class: type[Any], fields: Mapping[str, Any], source: str
) -> Iterator[tuple[str, str]]:
    """Return the variants in which a family differs from `transformers`, each with the difference.

    A variant that `transformers` cannot compute has no reference and is left out.

    Args:
        model_type: the type. module_class: the causal language model of the family.
        fields: all fields of a small configuration.
        source: the source of the family.
    """
    usual = Sample(model_type, "usual", Cases({"usual": fields}, tiny=False))
    for variant in list_variants(model_type, fields):
        problem = compare_variant(variant, usual, module_class, source)
        if problem is not None:
            yield variant.name, problem


def compare_variant(
    variant: Variant, usual: Sample, module_class: type[Any], source: str
) -> str | None:
    """Return how a family differs from `transformers` in a variant; None if it does not.

    Args:
        variant: the variant. usual: the small configuration that it changes.
        module_class, source: as for `find_faults`.
    """
    cases = Cases({variant.name: variant.fields}, tiny=False)
    sample = Sample(usual.model_type, variant.name, cases)
    try:
        logits = sample.torch_logits
    except Exception:  # transformers cannot compute this variant
        return None
    is_empty = any(value.numel() == 0 for value in sample.torch_model.parameters())
    if is_empty or not np.isfinite(logits[sample.real]).all():
        return None
    is_read = any(name in source for name in variant.changed)
    if variant.is_optional and not is_read and np.array_equal(logits, usual.torch_logits):
        return None
    try:
        error = sample.compare(module_class)
    except Exception as error_of_family:  # a family that cannot load or run is a fault too
        is_refused = is_refusal(error_of_family, variant.changed)
        return None if is_refused else _summarize(error_of_family)
    return None if error <= BOUND else f"logits differ by {error:.1e}"


def is_refusal(error: BaseException | None, names: tuple[str, ...]) -> bool:
    """Return whether an error, or its cause, refuses a configuration and names a field."""
    if error is None:
        return False
    is_named = any(name in str(error) for name in names)
    return (isinstance(error, ConfigError) and is_named) or is_refusal(error.__cause__, names)


def _summarize(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return f"{type(error).__name__}: {' '.join(lines[:4])}"


def main(model_types: list[str]) -> int:
    """Compare families that exist; 1 if one differs in a variant."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    require_torch()
    from tests.conformance.cases import subjects

    status = 0
    for model_type in model_types:
        subject = subjects(model_type)[0]
        source = inspect.getsource(sys.modules[subject.module_class.__module__])
        faults = list(find_faults(model_type, subject.module_class, subject.fields, source))
        count = len(list_variants(model_type, subject.fields))
        print(f"{model_type}: {count} variants, {len(faults)} differ", flush=True)
        for name, problem in faults:
            print(f"  {name}: {problem}", flush=True)
        status |= int(bool(faults))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
