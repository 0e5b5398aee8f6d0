"""Draft a family: run the small model, express its parts, and search until the logits agree."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from ed_models.conformance import Cases

from tools.new_family import mixers, parts, tiny, wording
from tools.new_family.draft import Draft
from tools.new_family.lineage import Lineage, follow_parents, read_lineage
from tools.new_family.names import FileNames, build_names, read_files
from tools.new_family.trace import NotTraced, Trace, trace_model
from tools.new_family.variants import BOUND, Sample, find_faults

#: Largest number of drafts that the search compares.
LARGEST_SEARCH = 24
#: Fields of dropout rates: of the outputs of a layer's parts, of the embeddings, of the input of
#: the last projection, and of the scores.
LAYER_DROPOUT = ("resid_pdrop", "resid_dropout", "hidden_dropout", "hidden_dropout_prob")
EMBEDDING_DROPOUT = ("embd_pdrop", "embed_dropout", "hidden_dropout_prob")
INNER_DROPOUT = ("activation_dropout",)
SCORE_DROPOUT = ("attn_pdrop", "attention_probs_dropout_prob")
#: Conditions of rotary positions in models whose other layers have none.
ROTATED = (
    "get_layer_window(config, index)",
    'config.layer_types[index] == "sliding_attention"',
    "config.sliding_window is None or get_layer_window(config, index)",
)


@dataclass
class Result:
    """What drafting a type gave.

    Attributes:
        draft: the draft whose logits agree; None if none does.
        lineage: the parents. chain: the types from this one to one of this project.
        errors: name of a row -> largest difference of the logits.
        tried: switches of the search, with their errors.
        unexplained: why there is no draft.
        rows: the small configurations.
        seconds: duration.
        base_phrases: the properties of the parent.
    """

    lineage: Lineage
    chain: list[str]
    rows: dict[str, dict[str, Any]]
    draft: Draft | None = None
    errors: dict[str, float] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    unexplained: str = ""
    seconds: float = 0.0
    base_phrases: list[str] = field(default_factory=list)


def load_draft(draft: Draft) -> type[Any]:
    """Execute the source of a draft, and return the class of the model."""
    name = f"ed_models.families.{draft.model_type.replace('-', '_')}"
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(draft.source, f"{draft.model_type}.py", "exec"), vars(module))
    return getattr(module, draft.class_name)


def draft_family(model_type: str, known: set[str], *, own_head_size: bool = True) -> Result:
    """Draft a family.

    Args:
        model_type: a type of `transformers` with a causal language model.
        known: model types of this project.
        own_head_size: whether the small configurations have heads of another size than their share
            of the hidden size.
    """
    began = time.perf_counter()
    config_class, model_class = find_classes(model_type)
    rows = tiny.build_rows(config_class)
    if not own_head_size:
        rows = {row: {**fields, "head_dim": 8} for row, fields in rows.items()}
    rows = {
        "usual fields": rows["usual fields"],
        tiny.name_second_row(*rows.values()): rows["other choices"],
    }
    file = Path(sys.modules[model_class.__module__].__file__ or "")
    stem = config_class.__name__.removesuffix("Config").removesuffix("Text")
    lineage = read_lineage(file, stem)
    if file.stem != f"modeling_{sys.modules[config_class.__module__].__name__.split('.')[-2]}":
        lineage = replace(lineage, parts=(), other_base=file.parent.name)
    chain = follow_parents(file.parent.name, known - {model_type}, file.parent.parent)
    result = Result(lineage, chain, rows)
    try:
        samples = [Sample(model_type, row, Cases(rows)) for row in rows]
        head = samples[1].torch_model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:  # a tied head of this project has no bias
            rows = {row: {**fields, "tie_word_embeddings": False} for row, fields in rows.items()}
            result.rows = rows
            samples = [Sample(model_type, row, Cases(rows)) for row in rows]
        draft = express(model_type, stem, samples)
        result.base_phrases = describe_base(result.lineage.base)
        _search(describe_draft(draft, result), samples, result)
    except NotTraced as error:
        result.unexplained = str(error)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        result.unexplained = f"the small model cannot run: {error}"
    if own_head_size and result.draft is None and "of another shape" in " ".join(result.tried):
        # The type has the field, but its heads always share the hidden size.
        return draft_family(model_type, known, own_head_size=False)
    result.seconds = time.perf_counter() - began
    return result


def find_classes(model_type: str) -> tuple[Any, Any]:
    """Return the classes of the configuration and of the causal language model.

    Raises:
        NotTraced: `transformers` has no causal language model of the type.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise NotTraced(f"transformers has no model type {model_type!r}")
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotTraced(f"transformers has no causal language model of {model_type!r}")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return config_class, model_class[0] if isinstance(model_class, tuple) else model_class


def express(model_type: str, stem: str, samples: list[Sample]) -> Draft:
    """Return the first draft of a type, from the trace of its second configuration."""
    usual, full = samples
    trace = trace_model(full.torch_model, full.ids)
    toggled = Toggled(model_type, full)
    layer, layer_arguments, norms = parts.describe_order(trace)
    attention_name = parts.find_part(trace.layers[-1], attention=True)
    attention = parts.describe_attention(trace, toggled.under(attention_name))
    values: dict[str, Any] = {
        "layer": layer,
        "layer_arguments": layer_arguments,
        "attention_class": attention["attention_class"],
        "attention": attention["attention"],
    }
    norm_name = trace.norm or trace.name_child(trace.layers[0], next(iter(norms.values())))
    values["norm"] = parts.describe_norm(trace, norm_name)
    entry = parts.describe_entry(trace)
    position = entry.pop("position_module", None)
    values |= entry
    values |= _describe_condition(usual, entry)
    values |= parts.describe_head(trace)
    dense, sparse = _describe_mixers(trace, toggled, values)
    values |= _describe_kinds(trace, sparse)
    values |= _describe_dropout(trace, values)
    if not trace.rotations:
        values["rope_settings"] = "{}"
    elif getattr(trace.config, "layer_rope_theta", None):
        values["rope_settings"] = "build_theta_settings(self.config, self.config.layer_rope_theta)"
        values["kinds"] = "list(zip(config.layer_types, config.layer_rope_theta, strict=True))"
    elif "rotary_dim" in tiny.list_fields(type(trace.config)):
        values["rope_settings"] = "{ALL_LAYERS: RopeSettings({}, head_dim=self.config.rotary_dim)}"
    files = FileNames(trace, read_files(full.directory))
    head_name = _find_head_name(usual)
    if head_name is not None:
        files.names[f"{trace.head}.weight"] = head_name
    groups = "num_attention_heads" if "qkv" in attention["modules"] else None
    if trace.config.num_attention_heads != parts_kv_heads(trace.config):
        groups = None
    names = build_names(
        trace, files, norms, attention, dense, sparse, position, fused_groups=groups
    )
    values |= {"renames": names.renames, "rules": names.rules, "modules": names.modules}
    draft = Draft(
        model_type=model_type,
        stem=stem,
        config_class=type(trace.config).__name__,
        model_class=type(trace.model).__name__,
        title="",
        modeling=trace.source_file.stem,
        **values,
    )
    fixed = toggled.find_fixed(draft.classes())
    if draft.head_bias is not None:  # a tied head of this project has no bias
        fixed["tie_word_embeddings"] = False
    return replace(draft, fixed=fixed)


def _find_head_name(sample: Sample) -> str | None:
    """Return the name of the matrix of an untied head in the files of a sample."""
    weight = sample.torch_model.get_output_embeddings().weight.detach().numpy().tobytes()
    tensors = read_files(sample.directory)
    return next((n for n, tensor in tensors.items() if tensor.tobytes() == weight), None)


def parts_kv_heads(config: Any) -> int:
    """Return the number of key heads of a configuration."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def describe_draft(draft: Draft, result: Result) -> Draft:
    """Return the draft with the title and the list of its properties."""
    phrases, base = wording.describe(draft), result.lineage.base
    title = wording.write_title(
        draft.stem,
        result.lineage.authors,
        _find_base_stem(base) if base else None,
        phrases,
        result.base_phrases,
    )
    bullets = () if len(phrases) == 1 and phrases[0] in title else tuple(phrases)
    return replace(draft, title=title, bullets=bullets)


def describe_base(base: str | None) -> list[str]:
    """Return the properties of a parent; none if it cannot be described."""
    if base is None:
        return []
    try:
        config_class, _ = find_classes(base)
        rows = tiny.build_rows(config_class)
        return wording.describe(express(base, "", [Sample(base, row, Cases(rows)) for row in rows]))
    except (NotTraced, RuntimeError, ValueError):
        return []


def _find_base_stem(base: str) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    name = CONFIG_MAPPING_NAMES.get(base, base.capitalize())
    return name.removesuffix("Config")


class Toggled:
    """The Boolean fields that create parameters, from models without memory.

    Args:
        model_type: the type. sample: its configuration with all choices.
    """

    def __init__(self, model_type: str, sample: Sample):
        self.model_type, self.fields, self.sample = model_type, sample.fields, sample
        names = [name for name in tiny.TOGGLED if name in self.fields]
        off = self._list_names(dict.fromkeys(names, False))
        self.created = {
            name: self._list_names({**dict.fromkeys(names, False), name: True}) - off
            for name in names
        }

    def find_fixed(self, source: str) -> dict[str, bool]:
        """Return the Boolean fields that a source does not read, but that change the logits."""
        import transformers

        config = transformers.AutoConfig.for_model(self.model_type, **self.sample.fields)
        shared = transformers.PreTrainedConfig.__dataclass_fields__
        fields = tiny.list_fields(type(config)).keys() - shared.keys() - self.created.keys()
        values = {name: getattr(config, name, None) for name in sorted(fields)}
        # Other fields act only through the configuration, which this project shares.
        model = inspect.getsource(sys.modules[type(self.sample.torch_model).__module__])
        read = {name: v for name, v in values.items() if f"config.{name}" in model}
        unread = {n: v for n, v in read.items() if isinstance(v, bool) and n not in source}
        return {name: value for name, value in unread.items() if self._changes(name, not value)}

    def _changes(self, name: str, value: bool) -> bool:
        """Return whether a value of a field gives other parameters or other logits."""
        import transformers

        sample = self.sample
        try:
            config = transformers.AutoConfig.for_model(
                self.model_type, **{**sample.fields, name: value}
            )
            model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
            model.load_state_dict(sample.torch_model.state_dict())
            logits = sample.torch_outputs(model)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
            return True
        return float(np.abs(logits - sample.torch_logits).max()) > BOUND

    def _list_names(self, changes: dict[str, bool]) -> set[str]:
        import torch
        import transformers

        config = transformers.AutoConfig.for_model(self.model_type, **{**self.fields, **changes})
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        return {name for name, _ in model.named_parameters()}

    def under(self, part: str) -> Callable[[str], set[str]]:
        """Return a function: name of a parameter below a part of a layer -> fields."""
        return functools.partial(self._find_fields, part)

    def _find_fields(self, part: str, name: str) -> set[str]:
        suffix = f".{part}.{name}" if part else f".{name}"
        return {
            field
            for field, created in self.created.items()
            if any(parameter.endswith(suffix) for parameter in created)
        }


def _describe_condition(usual: Sample, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the factor of the embeddings if a field switches it."""
    switches = [n for n in ("mup_enabled", "scale_embedding") if n in usual.fields]
    fields = tiny.list_fields(type(usual.torch_model.config))
    switches = [n for n in ("mup_enabled", "scale_embedding") if n in fields]
    if not switches or not entry.get("scaled"):
        return {}
    factor = f"self.config.hidden_size**0.5 if self.config.{switches[0]} else 1.0"
    return {"scaled": False, "enter": (f"x * ({factor})",)}


def _describe_mixers(
    trace: Trace, toggled: Toggled, values: dict[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Add the feed-forward parts to the values of a draft; return the facts of their names."""
    dense = sparse = None
    for layer in trace.layers:
        names = list(layer.loose) or mixers.list_mixers(layer)
        if not layer.loose and any(mixers.is_sparse(layer.children[name]) for name in names):
            block = next(name for name in names if mixers.is_sparse(layer.children[name]))
            sparse = mixers.describe_sparse(trace, layer, names, toggled.under(block))
        else:
            prefix = names[0] if len(names) == 1 else ""
            dense = mixers.describe_dense(trace, layer, names, toggled.under(prefix))
    if sparse is not None:
        condition, _ = mixers.describe_condition(trace)
        values["sparse"] = replace(sparse["sparse"], condition=condition)
    if dense is not None:
        values["feed_forward"] = dense["feed_forward"]
        values["feed_forward_arguments"] = dense["feed_forward_arguments"]
    return dense, sparse


def _describe_kinds(trace: Trace, sparse: dict[str, Any] | None) -> dict[str, Any]:
    if [layer.rotated for layer in trace.layers] == [
        bool(value) for value in getattr(trace.config, "no_rope_layers", None) or []
    ]:
        return {"kinds": "list(zip(config.layer_types, config.no_rope_layers, strict=True))"}
    if getattr(trace.config, "attention_layers", None):
        return {"kinds": "config.attention_layers"}
    if sparse is None:
        return {}
    _, kinds = mixers.describe_condition(trace)
    if kinds is None:
        return {}
    if getattr(trace.config, "layer_types", None):
        return {"kinds": f"list(zip(config.layer_types, {kinds}, strict=True))"}
    return {"kinds": kinds}


def _describe_dropout(trace: Trace, values: dict[str, Any]) -> dict[str, Any]:
    """Return the dropout rates, by the names of the fields that the modeling file reads."""
    layer = trace.layers[-1].module
    in_layer = "".join({inspect.getsource(type(m)) for m in layer.modules() if _is_own(m)})
    in_body = inspect.getsource(type(trace.model.get_submodule(trace.body)))

    def find_field(names: tuple[str, ...], text: str) -> str | None:
        known = [name for name in names if name in tiny.list_fields(type(trace.config))]
        return next((name for name in known if re.search(rf"config\.{name}\b", text)), None)

    found: dict[str, Any] = {}
    if (name := find_field(LAYER_DROPOUT, in_layer)) and values["layer"] != "PostNormLayer":
        found["layer_arguments"] = {**values["layer_arguments"], "dropout": f"config.{name}"}
    if name := find_field(INNER_DROPOUT, in_layer):
        arguments = values.get("feed_forward_arguments", {})
        found["feed_forward_arguments"] = {**arguments, "dropout": f"config.{name}"}
    if name := find_field(EMBEDDING_DROPOUT, in_body):
        dropped = f'ctx.apply_dropout(x, self.config.{name}, "embeddings")'
        found["enter"] = (*values.get("enter", ()), dropped)
    if name := find_field(SCORE_DROPOUT, in_layer):
        found["attributes"] = {"attention_dropout": name}
    return found


def _is_own(module: Any) -> bool:
    return type(module).__module__.startswith("transformers.models")


# The search.


def list_switches(draft: Draft) -> Iterator[tuple[str, Draft]]:
    """Return the drafts that differ in one known property, each with the name of the switch."""
    attention = draft.attention
    position = attention.get("position", "Rotary()")
    if draft.attention_class == "SelfAttention" and "Rotary(" in position:
        turned = (
            position.replace(", interleaved=True", "").replace("interleaved=True", "")
            if "interleaved" in position
            else position.replace("Rotary()", "Rotary(interleaved=True)")
        )
        yield "rotary pairs", _set_attention(draft, position=turned)
        yield "no positions", _set_attention(draft, position="None")
        for condition in ROTATED:
            if " if " in position and f" if {condition} " not in position:
                rotary = position.partition(" if ")[0]
                turned = f"{rotary} if {condition} else None"
                yield f"positions if {condition}", _set_attention(draft, position=turned)
    norm = attention.get("norm")
    if norm is not None:
        turned = norm.replace(", last=True", "") if "last" in norm else f"{norm[:-1]}, last=True)"
        yield "order of norms and positions", _set_attention(draft, norm=turned)
    if "mask" in attention:
        others = {n: v for n, v in attention.items() if n != "mask"}
        yield "no windows", replace(draft, attention=others)
    for number, rule in enumerate(draft.rules):
        if rule.startswith('*fused(("q_proj"'):
            plain = rule.split(", groups=")[0].rstrip(")") + ")"
            other = '*fused(("q_proj", "v_proj", "k_proj")'
            if not rule.startswith(other):
                changed = rule.split(", groups=")[0].rstrip(")") + ", groups=4)"
                changed = changed.replace('"k_proj", "v_proj"', '"v_proj", "k_proj"')
                rules = (*draft.rules[:number], changed, *draft.rules[number + 1 :])
                yield "queries, values and keys in four groups", replace(draft, rules=rules)
            for groups in ("", ', groups="num_attention_heads"', ', groups="num_key_value_heads"'):
                fused = f"{plain[:-1]}{groups})"
                if fused != rule:
                    changed = (*draft.rules[:number], fused, *draft.rules[number + 1 :])
                    yield f"order of fused projections{groups}", replace(draft, rules=changed)
    if draft.sparse is not None and "normalize" in draft.sparse.router:
        router = {n: v for n, v in draft.sparse.router.items() if n != "normalize"}
        yield "normalized weights", replace(draft, sparse=replace(draft.sparse, router=router))
    if draft.attention_class == "SelfAttention" and "scores" not in attention:
        yield "scores without a factor", _set_attention(draft, scores="ScoreRule(scale=1.0)")
    if "scores" in attention:
        others = {n: v for n, v in attention.items() if n != "scores"}
        yield "usual factor of scores", replace(draft, attention=others)


def _set_attention(draft: Draft, **arguments: str) -> Draft:
    return replace(draft, attention={**draft.attention, **arguments})


def _search(draft: Draft, samples: list[Sample], result: Result) -> None:
    """Try the draft, then one switch, then two, until the logits of all samples agree."""
    seen: set[str] = set()
    singles = list(list_switches(draft))
    candidates: list[tuple[str, Draft]] = [("as traced", draft), *singles]
    candidates += [
        (f"{name} and {other}", second)
        for name, first in singles
        for other, second in list_switches(first)
    ]
    best, faults = float("inf"), list[str]()
    for number, (name, candidate) in enumerate(candidates[:LARGEST_SEARCH]):
        if number > len(singles) and best == float("inf"):
            break  # no draft could be loaded: the names of the parameters differ
        source = candidate.classes()
        if source in seen:
            continue
        seen.add(source)
        try:
            errors = _compare(candidate, samples)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            result.tried.append(f"{name}: {' '.join(line.strip() for line in lines[:6])}")
            continue
        worst = max(errors.values())
        result.tried.append(f"{name}: {worst:.1e}")
        best = min(best, worst)
        if worst <= BOUND:
            fault = find_fault(candidate, samples)
            if fault is None:
                result.draft, result.errors = describe_draft(candidate, result), errors
                return
            result.tried.append(f"{name}: {fault}")
            faults.append(fault)
    result.unexplained = (
        f"the logits of the small configurations agree, but {faults[0]}"
        if faults
        else f"no known switch makes the logits agree; the smallest difference is {best:.1e}"
    )


def find_fault(draft: Draft, samples: list[Sample]) -> str | None:
    """Return the first variant of the usual configuration in which a draft is wrong."""
    usual = samples[0]
    faults = find_faults(usual.model_type, load_draft(draft), usual.fields, draft.classes())
    return next((f"not with {variant}: {problem}" for variant, problem in faults), None)


def _compare(draft: Draft, samples: list[Sample]) -> dict[str, float]:
    module_class, errors = load_draft(draft), {}
    for sample in samples:
        errors[sample.row] = sample.compare(module_class)
        if errors[sample.row] > BOUND:
            break
    return errors
