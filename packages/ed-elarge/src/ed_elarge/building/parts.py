"""Builders: each function builds one part of an `eLargeModel` from its section.

`ed_elarge.config.table` maps each part to its builder. `eLargeModel.part` calls the builder at the
first use of the part and caches the result. Each function imports the packages that it needs.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ed_data.config import Mixture
from ed_infra.config.fields import canonical_field
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger
from ed_trainers.arguments import ROLES, Role
from ed_trainers.options.supervised import ClassifierArguments

from ed_elarge.building import media
from ed_elarge.building.dtypes import list_dtypes, trains_adapters_only
from ed_elarge.building.engines import list_mtp_fields, served_task
from ed_elarge.building.read_fields import add_read_fields
from ed_elarge.building.stored_config import (
    count_embedding_rows,
    get_sequence_length,
    resize_tokens,
)
from ed_elarge.building.widths import scale_arguments, scale_model
from ed_elarge.config.adaptation import WeightFormat
from ed_elarge.config.checkpoint_tasks import SEPARATE_TASKS
from ed_elarge.config.checks.training import GENERATING
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.sections import ModelSection, OtherModelSection
from ed_elarge.config.table import SECTIONS
from ed_elarge.errors import Problem
from ed_elarge.model import eLargeModel

if TYPE_CHECKING:
    from ed_data.batches.loader import Loader, StreamLoader
    from ed_infra.config import EasyDeLBaseConfig
    from ed_infra.specs import EasyDeLQuantizationConfig
    from ed_models.checkpoints.tokenizers import AudioTextProcessor
    from ed_models.tasks.causal_lm import CausalLM
    from ed_trainers.rewards import RewardFunction
    from ed_trainers.trainer import Trainer
    from transformers import BaseImageProcessor, PreTrainedTokenizerBase, ProcessorMixin


logger = get_logger(__name__)

#: Optimizers with small moments.
SMALL_MOMENTS = ("adamw_8bit", "lion_8bit", "adafactor")


# The tokenizer.


def build_tokenizer(elm: eLargeModel) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer, or train it on the training texts (later runs load it).

    A model without text has no tokenizer.
    """
    from ed_models.checkpoints.tokenizers import load_tokenizer, set_chat_template

    from ed_elarge.building import tokenizer_training

    run = elm.config
    section = _model_section(run).tokenizer_section
    with run.blame("model", _model_section(run).tokenizer_key):
        if not run.has_text:
            return None
        if run.has_processor and not has_new_images(run):
            loaded_tokenizer = elm.part("processor").tokenizer
        elif section.train is not None:
            loaded_tokenizer = tokenizer_training.load_or_train(
                section.train,
                _mixture(run),
                run.directory / "tokenizer",
                run.schema,
                mask_token=run.task == TaskType.MASKED_LM,
                special_tokens=run.method_entry.special_tokens,
                resumes=run.resumes,
            )
        else:
            loaded_tokenizer = load_tokenizer(**_tokenizer_source(run))
    if section.chat_template is not None:
        with run.blame("model", "tokenizer", "chat_template"):
            set_chat_template(loaded_tokenizer, section.chat_template)
    return loaded_tokenizer


def processor(elm: eLargeModel) -> ProcessorMixin | BaseImageProcessor | AudioTextProcessor:
    """Load the processor of a model of images or recordings, which contains its tokenizer.

    A new model of speech may train its tokenizer. A new model of images gets an image processor
    for its `image_size`.
    """
    from ed_models.checkpoints.tokenizers import (
        load_audio_processor,
        load_image_processor,
        load_processor,
        set_chat_template,
    )

    run = elm.config
    section = _model_section(run).tokenizer_section
    template = section.chat_template
    with run.blame("model", _model_section(run).tokenizer_key):
        if run.has_audio and section.train is not None:
            return media.train_processor(run, section.train)
        if has_new_images(run):
            return media.new_processor(new_config(run), elm.part("tokenizer"))
        part = "feature_extractor" if run.has_audio else "image_processor"
        if not run.has_text:
            return load_image_processor(**_tokenizer_source(run))
        loaded_processor: Any
        if run.has_recordings:
            loaded_processor = load_audio_processor(**_tokenizer_source(run))
        else:
            loaded_processor = load_processor(**_tokenizer_source(run), part=part)
    if template is not None:
        with run.blame("model", "tokenizer", "chat_template"):
            set_chat_template(loaded_processor, template)
    return loaded_processor


def has_new_images(run: RunConfig) -> bool:
    """Whether a new model of images gets a separate processor."""
    section = _model_section(run)
    vision_language = run.task == TaskType.IMAGE_TEXT_TO_TEXT
    if section.config is None or not run.has_images or vision_language:
        return False
    return run.has_text or section.tokenizer_section.name_or_path is None


def _tokenizer_source(run: RunConfig) -> dict[str, Any]:
    """Return the arguments that load the tokenizer or processor."""
    section = _model_section(run)
    extras = section.extra_kwargs
    return {
        "name": str(section.tokenizer_section.name_or_path or section.name_or_path),
        "revision": extras.revision,
        "trust_remote_code": extras.trust_remote_code or run.loader.trust_remote_code,
    }


# The model.


def build_model(elm: eLargeModel) -> CausalLM:
    """Load the model, or create a new one from `model.config`, on its devices."""
    section = _model_section(elm.config)
    if section.config is not None:
        loaded_model = _new_model(elm)
        if section.has_widths:
            loaded_model = scale_model(elm, loaded_model)
    else:
        loaded_model = resize_tokens(elm, _load(elm.config))
    for entry in SECTIONS.values():
        if entry.finishes:
            loaded_model = pkgutil.resolve_name(entry.finishes)(elm, loaded_model)
    return loaded_model


def build_layout(policy: str, optimizer: str) -> dict[str, Any]:
    """Return the default of `scan_layers` on these devices.

    On one CPU, layers with separate arrays are faster: a scan copies the parameters of each layer,
    and its gradients into the stacked ones. A step of many layers compiles longer, once. Stacked
    layers remain where a run saves memory: the updates of small moments then need less, and the
    recomputation needs more time than the copies.

    Args:
        policy: `gradient_checkpointing`.
        optimizer: The optimizer of the trainer; empty without training.
    """
    from ed_infra.freed_memory import has_one_cpu

    saves = policy != "" or optimizer in SMALL_MOMENTS
    return {"scan_layers": False} if has_one_cpu() and not saves else {}


def choose_run_layout(run: RunConfig) -> dict[str, Any]:
    """Return the default of `scan_layers` of a run on these devices."""
    import jax

    if run.trainer is None and jax.default_backend() == "gpu":
        return {"scan_layers": False}  # only the engine reads the weights: see `choose_layout`
    policy = run.execution_fields()["gradient_checkpointing"]
    return build_layout(policy, "" if run.trainer is None else run.trainer.optimizer)


def new_config(
    run: RunConfig,
    tokenizer_fields: dict[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> EasyDeLBaseConfig:
    """Return the configuration of a new model.

    Args:
        run: The run, with `model.config`.
        tokenizer_fields: Defaults from the tokenizer; None for a check before the tokenizer exists.
        defaults: Further defaults.
    """
    from ed_infra import registry

    section = _model_section(run)
    fields = {canonical_field(key): value for key, value in (section.config or {}).items()}
    changes = {field: value for field, (_, value) in run.config_fields().items()}
    with run.blame("model", "config"):
        model_type = fields.pop("model_type")
        text = fields.get("text_config")
        if tokenizer_fields is not None and isinstance(text, Mapping):  # the language model inside
            fields["text_config"] = {**tokenizer_fields, **text}
            tokenizer_fields = None
        config_values = {
            **_labels(run),
            **(defaults or {}),
            **(tokenizer_fields or {}),
            **fields,
            **changes,
        }
        return registry.get_config(model_type)(**config_values)


def _labels(run: RunConfig) -> dict[str, Any]:
    """Return the classes of a classification head, as fields of the configuration."""
    if isinstance(run.trainer, ClassifierArguments):
        return run.trainer.config_fields
    labels = run.method_entry.labels
    return {} if labels is None else {"num_labels": labels}


def _new_model(elm: eLargeModel) -> CausalLM:
    from ed_data.tokens.tokenizers import count_ids
    from ed_infra import registry

    run, tokens = elm.config, elm.build_tokenizer()
    tokenizer_fields = {} if tokens is None else _get_tokenizer_fields(run, tokens)
    config = new_config(run, tokenizer_fields, {**choose_run_layout(run), **list_mtp_fields(run)})
    with run.blame("model", "config"):
        vocab_size = config.get_text_config().vocab_size if tokenizer_fields else 0
        if tokens is not None and tokenizer_fields and vocab_size < count_ids(tokens):
            raise ConfigError(
                f"vocab_size {vocab_size} is less than the tokenizer's {count_ids(tokens)} "
                "tokens: raise it, or omit it"
            )
        module = registry.get_module(run.task, config.model_type)
        seed = run.trainer.seed if run.trainer is not None else 0
        new_model = module.create(config, seed=seed, **list_dtypes(run))
        if run.has_audio:
            media.set_generation(new_model, tokens)
    if run.weight_format is None:
        return new_model
    with run.blame("quantization", "model"):
        return new_model.quantize(build_weight_format(run.weight_format))


def _get_tokenizer_fields(run: RunConfig, tokens: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the fields of a new model that depend on the tokenizer."""
    from ed_data.tokens.tokenizers import count_ids

    return {
        "vocab_size": count_ids(tokens),
        "bos_token_id": tokens.bos_token_id,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": tokens.pad_token_id,
        **(media.speech_config_fields(tokens) if run.has_audio else {}),
    }


def _load(run: RunConfig) -> CausalLM:
    from ed_infra import registry
    from ed_models.checkpoints import hub
    from ed_models.checkpoints.checks import detect_task

    section = _model_section(run)
    changes = {**choose_run_layout(run), **list_mtp_fields(run)}
    changes["sharding_axis_names"] = run.sharding.axis_names
    changes |= {field: value for field, (_, value) in run.config_fields().items()}
    dims = changes.pop("sharding_axis_dims", run.sharding.axis_dims)
    with run.blame("model", "name_or_path"):
        source, revision = str(section.name_or_path), section.extra_kwargs.revision
        local = hub.resolve(source, revision=revision)
        task = detect_task(local) if run.task == TaskType.AUTO_BIND else run.task
        if run.trainer is None and section.task is None:
            task = served_task(local, task)
        if run.trainer is not None and task not in run.tasks:
            task_names = ", ".join(repr(task.value) for task in run.tasks)
            raise ConfigError(
                f"`architectures` in config.json of {local} names a model for {task.value!r}, and "
                f"{run.method} trains models for {task_names}: set model.task"
            )
        if run.task == TaskType.AUTO_BIND and task in SEPARATE_TASKS:
            raise ConfigError(
                f"{local} is a model for {task.value!r}, whose data must be known before the model "
                f"is loaded: set model.task: {task.value}"
            )
        if task not in GENERATING:
            changes = {**_labels(run), **changes}
        module = registry.get_module(task, hub.read_config(local, task).model_type)
        dtypes = list_dtypes(run, local if trains_adapters_only(run) else None)
        options = {"sharding_axis_dims": dims, "config_kwargs": changes, **dtypes}
        options["revision"] = revision
        if run.weight_format is None:
            return module.from_pretrained(source, **options)
    with run.blame("quantization", "model"):
        rules = build_weight_format(run.weight_format)
        return module.from_pretrained(
            source, quantization_config=rules, apply_quantization=True, **options
        )


def _role_model(elm: eLargeModel, role: Role) -> CausalLM:
    section = elm.config.sections[role.section]
    assert section is None or isinstance(section, OtherModelSection)
    roles = {method_role.name: method_role for method_role in elm.config.method_entry.roles}
    task = roles.get(role.name, role).task
    if task == TaskType.CAUSAL_LM and elm.config.task in GENERATING:
        task = elm.config.task  # the model reads the batches of the trained model
    return resize_tokens(elm, _load_other(elm.config, section, task))


#: Builders of the models other than the trained one, by role.
ROLE_MODELS = SimpleNamespace(
    **{name: partial(_role_model, role=role) for name, role in ROLES.items()}
)


def _load_other(
    run: RunConfig, section: OtherModelSection | None, task: TaskType = TaskType.CAUSAL_LM
) -> CausalLM:
    """Load a model on the mesh of the trained model, with the execution fields of the run."""
    from ed_infra import registry
    from ed_infra.config.fields import FIELDS
    from ed_models.checkpoints import hub

    assert section is not None, "this part is built only if its section exists"
    config_fields = {field: value for field, (_, value) in run.config_fields().items()}
    changes = choose_run_layout(run) | {
        field: value for field, value in config_fields.items() if field in FIELDS
    }
    changes["sharding_axis_names"] = run.sharding.axis_names
    dims = changes.pop("sharding_axis_dims", run.sharding.axis_dims)
    local = hub.resolve(section.name_or_path, revision=section.revision)
    module = registry.get_module(task, hub.read_config(local, task).model_type)
    # A synchronized reference is changed in small steps.
    follows = getattr(run.trainer, "sync_ref_model", False)
    dtypes = list_dtypes(run, None if follows else local)
    return module.from_pretrained(
        section.name_or_path,
        revision=section.revision,
        sharding_axis_dims=dims,
        config_kwargs=changes,
        **dtypes,
    )


def _model_section(run: RunConfig) -> ModelSection:
    if run.model is None:
        raise run.missing("model")
    return run.model


def show_parameters(elm: eLargeModel, model: CausalLM) -> CausalLM:
    """With `loader.verbose`, print each parameter: name, shape, dtype and sharding."""
    if not elm.config.loader.verbose:
        return model
    import jax
    from ed_infra import parameter_names
    from flax import nnx

    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
        names = parameter_names.canonical(path)
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        spec = getattr(leaf.sharding, "spec", "one device")
        print(f"  {name}  {list(leaf.shape)}  {leaf.dtype}  {spec}")
        total += leaf.size
    print(f"  {total:,} parameters")
    return model


def build_weight_format(section: WeightFormat) -> EasyDeLQuantizationConfig:
    from ed_infra.specs import EasyDeLQuantizationConfig

    keys = section.model_dump(exclude={"quantization_method"}, exclude_none=True)
    return EasyDeLQuantizationConfig(section.quantization_method, **keys)


def add_adapters(elm: eLargeModel, model: CausalLM) -> CausalLM:
    """Add the adapters to the model."""
    run, section = elm.config, elm.config.adapters
    if section is None:
        return model
    if run.lora is None:
        print(
            "quantized weights are frozen, and the section lora is missing: training adapters of "
            f"rank {section.rank} on every linear layer except the head"
        )
    if section.name_or_path is not None:
        from ed_models.adapters.peft import load_adapter
        from ed_models.checkpoints import hub

        with run.blame("lora", "name_or_path"):
            return load_adapter(model, hub.resolve(section.name_or_path)).shard_model()
    from ed_infra.specs import LoraSpec
    from ed_models.adapters.saved_modules import find_parameters

    with run.blame("lora", "modules_to_save"):
        find_parameters(model, section.modules_to_save or ())
    with run.blame("lora", "targets" if section.targets else ""):
        spec = LoraSpec(**section.model_dump(exclude={"name_or_path"}))
        return model.apply_lora(spec, seed=run.trainer.seed if run.trainer is not None else 0)


# Data and training.


def look_ahead(run: RunConfig) -> None:
    """Find errors before any data is tokenized.

    Create the configuration of a new model and its mesh, import the functions of the data, and
    check the fields of the first rows.

    Raises:
        InputError: One of these steps fails.
    """
    from ed_data import check_names

    if run.model is not None and run.model.config is not None:
        config = new_config(run)
        with run.blame("model", "config"):
            config.mesh  # noqa: B018 - creates the mesh
    remarks = check_names(_mixture(run), run.schema) if run.mixture is not None else []
    if remarks:
        raise run.error(
            [run.place(Problem(("mixture", *path), reason)) for path, reason in remarks]
        )


def loaders(elm: eLargeModel) -> tuple[Loader | StreamLoader, Loader | StreamLoader | None]:
    """Return the loaders of training and evaluation; the latter is None without held-out data."""
    from ed_data import build_loader, build_prompts

    run, tokens = elm.config, elm.build_tokenizer()
    mixture, trainer = _mixture(run, elm.reward_functions), run.trainer
    options: dict[str, Any] = {"seed": mixture.seed or 0, "schema": run.schema}
    if run.takes_prompts:
        build: Any = build_prompts
        if run.has_images:
            options["processor"] = elm.part("processor")
        options["embedding_rows"] = count_embedding_rows(run, elm.given_config)
        tools = elm.part("tools") if trainer is not None else None
        options["tools"] = () if tools is None else tools.schemas
    else:
        build = build_loader
        options["seq_length"] = get_sequence_length(run, elm.given_config) if run.has_text else None
        options |= other_inputs(elm)
    size = run.batch_size if trainer is None else trainer.loader_batch_size
    train = build(mixture, tokens, batch_size=size, split="train", **options)
    if not run.has_held_out:
        return train, None
    size = (trainer.eval_batch_size if trainer is not None else None) or size
    return train, build(mixture, tokens, batch_size=size, split="eval", **options)


def other_inputs(elm: eLargeModel) -> dict[str, Any]:
    """Return the arguments of `build_loader` for models that do not read one sequence of tokens."""
    run, options = elm.config, dict[str, Any]()
    if run.has_text:
        options["embedding_rows"] = count_embedding_rows(run, elm.given_config)
    if run.has_processor:
        options["processor"] = elm.part("processor")
    if run.has_recordings:
        options["recordings"] = elm.part("model").recording_form
    if run.schema.task in ("seq2seq_lm", "speech_seq2seq"):
        options["decoder_start_token_id"] = _decoder_start(elm)
    if run.schema.task == "ctc":
        options["time_steps"] = media.time_steps(elm.part("model").config)
    return options


def _decoder_start(elm: eLargeModel) -> int:
    """Return the first decoder token of an encoder-decoder model."""
    from ed_models.generation.options import special_token
    from ed_models.generation.values import validate_token_ids

    config = elm.part("model").config
    token = special_token(config, "decoder_start_token_id")
    start_tokens = validate_token_ids(
        "decoder_start_token_id", config.pad_token_id if token is None else token
    )
    if not start_tokens:
        raise elm.config.error(
            [Problem((*elm.config.prefix, "model"), "the model defines no decoder_start_token_id")]
        )
    return start_tokens[0]


def held_out_texts(elm: eLargeModel) -> list[str]:
    """Return the held-out texts of the mixture."""
    from ed_data import texts

    run = elm.config
    return list(texts(_mixture(run), "eval", schema=run.schema)) if run.has_held_out else []


def _mixture(run: RunConfig, functions: Sequence[RewardFunction] = ()) -> Mixture:
    if run.mixture is None:
        raise run.missing("mixture")
    return add_read_fields(run, run.mixture, functions)


def build_trainer(elm: eLargeModel) -> Trainer:
    """Create the trainer of the section `trainer`.

    A method that samples completions receives the engine here: this is the only function that uses
    both the trainer and the engine.
    """
    from ed_trainers.methods import trainer_class
    from ed_trainers.options.online import RewardedArguments

    from ed_elarge.engine.end_tokens import stop_after_answers

    run = elm.config
    arguments = scale_arguments(elm) if _model_section(run).has_widths else run.trainer
    assert arguments is not None, "`eLargeModel.part` checks the section"
    train, held_out = elm.build_dataset(), elm.build_eval_dataset()
    if run.schema.task == "speech_seq2seq":
        media.set_language(elm.part("model"), _mixture(run).tokenization)
    elif run.tasks[0] in GENERATING:
        stop_after_answers(elm.part("model"), elm.part("tokenizer"))
    role_names = (*run.method_entry.needs, *run.method_entry.may_read)
    configured_roles = [
        name for name in role_names if run.sections.get(f"{name}_model") is not None
    ]
    frozen = {name: elm.part(name) for name in configured_roles}
    benchmark = None
    if arguments.benchmarks and arguments.benchmark_interval is not None:
        from ed_elarge.engine.lending import EngineBenchmark

        benchmark = EngineBenchmark(elm)
    more: dict[str, Any] = {}
    if run.method_entry.samples:
        more = {"rollout": elm.part("rollout"), "reward_folders": (run.folder,)}
        more["tools"] = elm.part("tools")
    if isinstance(arguments, RewardedArguments):
        more["reward_functions"] = elm.reward_functions
    method, model = trainer_class(run.method), elm.part("model")
    processing_class = elm.part("processor" if run.has_processor else "tokenizer")
    with run.blame_trainer((*run.prefix, "trainer")):
        return method(
            arguments,
            model,
            train,
            held_out,
            processing_class,
            frozen=frozen,
            benchmark=benchmark,
            callbacks=elm.watchers,
            settings=list_settings(run),
            **more,
        )


def list_settings(run: RunConfig) -> dict[str, Any]:
    """Return the values outside of the trainer and the data that determine the result, by key.

    The configuration of the model is not among them: a checkpoint contains the configuration.
    """
    sections: dict[str, Any] = {
        "model": _model_section(run),
        "lora": run.adapters,
        "quantization.model": run.weight_format,
        **{role.section: run.sections.get(role.section) for role in ROLES.values()},
    }
    settings: dict[str, Any] = {"loader.dtype": run.loader.dtype}
    for name, section in sections.items():
        settings[name] = "absent" if section is None else "present"
        if section is not None:
            dumped = section.model_dump(mode="json", exclude={"config"})
            settings |= {f"{name}.{key}": value for key, value in _flatten(dumped)}
    return settings


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{below}", inner) for below, inner in _flatten(value))
        else:
            yield key, value
