"""Every name of the umbrella, and the module that owns it; nothing is defined here.

`NAMES` is what `import easydel as ed` offers. `MODULES` lists the paths that EasyDeL's guides
import from; each offers a part of the same names.
"""

from __future__ import annotations

from collections.abc import Callable

from ed_infra import lazy

_BY_OWNER: dict[str, str] = {
    # ed-infra
    "ed_infra.axes": "AXIS_NAMES PARAM_AXES PartitionAxis",
    "ed_infra.config": "EasyDeLBaseConfig",
    "ed_infra.config_dict": "EasyDeLBaseConfigDict",
    "ed_infra.dtypes": "canonical_dtype",
    "ed_infra.enums": (
        "AVAILABLE_ATTENTION_MECHANISMS AVAILABLE_GRADIENT_CHECKPOINT_TARGETS "
        "AVAILABLE_MOE_METHODS EasyDeLBackends EasyDeLGradientCheckPointers EasyDeLPlatforms "
        "EasyMethod TaskType"
    ),
    "ed_infra.errors": "CheckpointError ConfigError EasyDeLError MeshError RegistryError",
    "ed_infra.guide": "ModuleCaches NOT_GIVEN extract_commit_hash set_attrs_smartly",
    "ed_infra.masks": "MaskInfo",
    "ed_infra.mesh": "create_mesh",
    "ed_infra.options": "Options",
    "ed_infra.outputs": "BaseModelOutput CausalLMOutput Metric",
    "ed_infra.partition": "PartitionManager",
    "ed_infra.registry": "get_config get_module register_config register_module",
    "ed_infra.rules": "Rules",
    "ed_infra.specs": ("AttnMaskDetail BaseOperationConfig EasyDeLQuantizationConfig LoraSpec"),
    # ed-layers
    "ed_layers.attention": "MECHANISMS Mechanism attend",
    "ed_layers.cache": (
        "CrossCache DenseCache HybridCache LayerCacheSpec PagedCache RaggedBatch RecurrentCache "
        "RecurrentSpec StateSpec WindowCache"
    ),
    "ed_layers.context": "Ctx",
    "ed_layers.embed": "Embed",
    "ed_layers.linear": "Linear",
    "ed_layers.losses": "cross_entropy_sum token_logprobs",
    "ed_layers.mlp": "GatedMLP",
    "ed_layers.norms": "RMSNorm",
    "ed_layers.rotary": "apply_rotary rope_tables",
    "ed_layers.stack": "Stack to_layout",
    # ed-models
    "ed_models.auto": "AutoEasyDeLConfig AutoEasyDeLModelForCausalLM",
    "ed_models.bridge": "EasyBridgeMixin",
    "ed_models.families.llama": "LlamaConfig LlamaForCausalLM LlamaModel",
    "ed_models.generation": "EasyGenerationMixin GenerateOutput",
    "ed_models.module": "EasyDeLBaseModule",
    "ed_models.sampling": "TokenChoice",
    # ed-data
    "ed_data.checks": "check_names idle_options",
    "ed_data.config": "Inform Mixture Saving Tokenization",
    "ed_data.errors": "DataError",
    "ed_data.loader": "Loader StreamLoader build_loader",
    "ed_data.packing": "Packing pack",
    "ed_data.prepare": "contents default_cache_dir texts",
    "ed_data.save": "remove_cache save_mixture",
    "ed_data.schema": "Column Example Schema",
    "ed_data.sources": "read_rows",
    "ed_data.tokenizer": "train_bpe",
    "ed_data.transforms": "documents",
    # ed-trainers
    "ed_trainers.arguments": "ARGUMENTS SFTArguments TrainingArguments arguments_class",
    "ed_trainers.callbacks": "Callback",
    "ed_trainers.loop": "TrainingDiverged",
    "ed_trainers.methods": "trainer_class",
    "ed_trainers.rollout": "Completion Rollout",
    "ed_trainers.sft": "SFTTrainer",
    "ed_trainers.state": "EasyDeLState",
    "ed_trainers.trainer": "Trainer TrainerOutput",
    # ed-esurge
    "ed_esurge.config": "EngineConfig",
    "ed_esurge.engine": "AsyncEngine eSurge",
    "ed_esurge.lm_eval": "eSurgeLM",
    "ed_esurge.outputs": "CompletionOutput Logprob RequestMetrics RequestOutput",
    "ed_esurge.sampling": "SamplingParams",
    "ed_esurge.server": "create_app serve",
    # ed-elarge
    "ed_elarge.errors": "InputError",
    "ed_elarge.model": "eLargeModel",
}

#: Name -> the module that owns it.
NAMES: dict[str, str] = {
    name: owner for owner, names in _BY_OWNER.items() for name in names.split()
}


def _of(*owners: str) -> dict[str, str]:
    return {name: owner for name, owner in NAMES.items() if owner in owners}


_INFRA = [owner for owner in _BY_OWNER if owner.startswith("ed_infra.")]

#: Module path -> its names.
MODULES: dict[str, dict[str, str]] = {
    "easydel": NAMES,
    "easydel.infra": {
        **_of(*_INFRA, "ed_models.module", "ed_trainers.state", "ed_elarge.model"),
    },
    "easydel.infra.base_config": _of(
        "ed_infra.axes",
        "ed_infra.config",
        "ed_infra.config_dict",
        "ed_infra.enums",
        "ed_infra.guide",
        "ed_infra.partition",
        "ed_infra.specs",
    ),
    "easydel.infra.base_module": _of("ed_models.module"),
    "easydel.infra.base_state": _of("ed_trainers.state"),
    "easydel.infra.elarge_model": _of("ed_elarge.model"),
    "easydel.infra.errors": _of("ed_infra.errors", "ed_data.errors", "ed_elarge.errors"),
    "easydel.infra.etils": _of("ed_infra.enums"),
    "easydel.infra.factory": {
        **_of("ed_infra.registry"),
        "TaskType": "ed_infra.enums",
        "registry": "ed_infra.registry:*",
    },
    "easydel.infra.loss_utils": _of("ed_layers.losses"),
    "easydel.infra.mixins": _of("ed_models.bridge", "ed_models.generation"),
    "easydel.infra.mixins.bridge": _of("ed_models.bridge"),
    "easydel.infra.mixins.generation": _of("ed_models.generation"),
    "easydel.infra.modeling_outputs": _of("ed_infra.outputs"),
    "easydel.layers": {},
    "easydel.layers.quantization": _of("ed_infra.specs"),
    "easydel.layers.quantization.quantizers": {
        "EasyDeLQuantizationConfig": "ed_infra.specs",
    },
    "easydel.infra.utils": _of("ed_infra.mesh", "ed_infra.dtypes", "ed_infra.masks"),
}

Attached = tuple[Callable[[str], object], Callable[[], list[str]], list[str]]


def attach(module: str) -> Attached:
    """`__getattr__`, `__dir__` and `__all__` of a module of the umbrella."""
    return lazy.attach(module, MODULES[module])
