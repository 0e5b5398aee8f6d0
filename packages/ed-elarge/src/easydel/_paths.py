"""EasyDeL's module paths with the names that each exports here.

`easydel._table` resolves the names; `_METHODS` contains the folders of its trainers.
"""

from __future__ import annotations

from easydel._other_names import TRANSFORM_NAMES

#: Folder of a trainer, the word in the names of its two files, and the stem of its classes.
_METHODS: tuple[tuple[str, str, str], ...] = (
    ("binary_classifier_optimization_trainer", "bco", "BCO"),
    ("contrastive_preference_optimization_trainer", "cpo", "CPO"),
    ("direct_preference_optimization_trainer", "dpo", "DPO"),
    ("distillation_trainer", "distillation", "Distillation"),
    ("embedding_trainer", "embedding", "Embedding"),
    ("generalized_knowledge_distillation_trainer", "gkd", "GKD"),
    ("group_filtered_policy_optimization", "gfpo", "GFPO"),
    ("group_relative_policy_optimization", "grpo", "GRPO"),
    ("group_sequence_policy_optimization", "gspo", "GSPO"),
    ("kto_trainer", "kto", "KTO"),
    ("nash_md_trainer", "nash_md", "NashMD"),
    ("odds_ratio_preference_optimization_trainer", "orpo", "ORPO"),
    ("on_policy_distillation_trainer", "on_policy_distillation", "OnPolicyDistillation"),
    ("proximal_policy_optimization_trainer", "ppo", "PPO"),
    ("reward_trainer", "reward", "Reward"),
    ("rlvr_trainer", "rlvr", "RLVR"),
    ("self_distillation_policy_optimization", "sdpo", "SDPO"),
    ("seq_kd_trainer", "seq_kd", "SeqKD"),
    ("sparse_distillation_trainer", "sparse_distillation", "SparseDistillation"),
    ("supervised_fine_tuning_trainer", "sft", "SFT"),
    ("xpo_trainer", "xpo", "XPO"),
)

#: Classes that find the model of a checkpoint, and their states.
_AUTO = (
    "AutoEasyDeLAnyToAnyModel AutoEasyDeLModel AutoEasyDeLModelForCausalLM "
    "AutoEasyDeLModelForEmbedding AutoEasyDeLModelForImageTextToText "
    "AutoEasyDeLModelForSeq2SeqLM AutoEasyDeLModelForSequenceClassification "
    "AutoEasyDeLModelForSpeechSeq2Seq AutoEasyDeLModelForZeroShotImageClassification "
    "AutoEasyDeLVisionModel AutoState AutoStateAnyToAnyModel AutoStateForCausalLM "
    "AutoStateForEmbedding AutoStateForImageSequenceClassification "
    "AutoStateForImageTextToText AutoStateForSeq2SeqLM AutoStateForSpeechSeq2Seq "
    "AutoStateForZeroShotImageClassification AutoStateVisionModel"
)

#: Module path -> names that the module exports.
PATHS: dict[str, str] = {
    "easydel.caching": "HybridCache RecurrentCache",
    "easydel.caching.hybrid": "HybridCache",
    "easydel.caching.hybrid.cache": "HybridCache",
    "easydel.caching.recurrent": "RecurrentCache",
    "easydel.caching.recurrent.cache": "RecurrentCache",
    "easydel.data": (
        "BaseDatasetInform DatasetLoadError DatasetMixture TextDatasetInform VisualDatasetInform "
        "build_dataset"
    ),
    "easydel.data.core": (
        "BaseDatasetInform DatasetLoadError DatasetMixture TextDatasetInform VisualDatasetInform"
    ),
    "easydel.data.core.types": (
        "BaseDatasetInform DatasetLoadError DatasetMixture TextDatasetInform VisualDatasetInform"
    ),
    "easydel.escale": "PartitionAxis PartitionManager create_mesh",
    "easydel.inference.esurge": (
        "CompletionOutput EngineRequest EngineRequestStatus RequestMetrics RequestOutput eSurge "
        "eSurgeApiServer eSurgeRunner"
    ),
    "easydel.inference.esurge.esurge_engine": "CompletionOutput RequestOutput eSurge",
    "easydel.inference.esurge.metrics": "RequestMetrics",
    "easydel.inference.esurge.request": "EngineRequest EngineRequestStatus",
    "easydel.inference.esurge.runners": "eSurgeRunner",
    "easydel.inference.esurge.runners.model_runner": "eSurgeRunner",
    "easydel.inference.esurge.server": "eSurgeApiServer",
    "easydel.inference.esurge.server.api_server": "eSurgeApiServer",
    "easydel.inference.evaluations": "eSurgeLMEvalAdapter",
    "easydel.inference.evaluations.esurge_eval": "eSurgeLMEvalAdapter",
    "easydel.inference.logits_process": "WhisperTimeStampLogitsProcessor",
    "easydel.inference.sampling_params": "SamplingParams",
    "easydel.inference.tools": "ToolParser ToolParserManager",
    "easydel.inference.tools.abstract_tool": "ToolParser ToolParserManager",
    "easydel.inference.tools.parsers": "",
    "easydel.inference.tools.parsers.abstract_tool_parser": "ToolParser ToolParserManager",
    "easydel.inference.vwhisper": "vWhisperInference vWhisperInferenceConfig",
    "easydel.inference.vwhisper.config": "vWhisperInferenceConfig",
    "easydel.inference.vwhisper.core": "vWhisperInference",
    "easydel.inference.vwhisper.server": "",
    "easydel.infra.base_config": (
        "AXIS_NAMES PARAM_AXES PartitionAxis EasyDeLBaseConfig EasyDeLBaseConfigDict "
        "AVAILABLE_ATTENTION_MECHANISMS AVAILABLE_GRADIENT_CHECKPOINT_TARGETS "
        "AVAILABLE_MOE_METHODS EasyDeLBackends EasyDeLGradientCheckPointers EasyDeLPlatforms "
        "EasyMethod TaskType ModuleCaches NOT_GIVEN extract_commit_hash set_attrs_smartly "
        "PartitionManager AttnMaskDetail BaseOperationConfig EasyDeLQuantizationConfig LoraSpec"
    ),
    "easydel.infra.base_module": "EasyDeLBaseModule EasyDeLBaseConfig EasyDeLBaseConfigDict",
    "easydel.infra.base_state": "EasyDeLState",
    "easydel.infra.elarge": "BenchmarkConfig eLargeModel",
    "easydel.infra.elarge.model": "eLargeModel",
    "easydel.infra.elarge.types": "TaskType",
    "easydel.infra.elarge_model": "eLargeModel",
    "easydel.infra.elarge_model.elarge_model": "eLargeModel",
    "easydel.infra.errors": (
        "CheckpointError ConfigError EasyDeLError MeshError RegistryError DataError InputError "
        "EasyDeLRuntimeError EasyDeLSyntaxRuntimeError"
    ),
    "easydel.infra.etils": (
        "AVAILABLE_ATTENTION_MECHANISMS AVAILABLE_GRADIENT_CHECKPOINT_TARGETS "
        "AVAILABLE_MOE_METHODS EasyDeLBackends EasyDeLGradientCheckPointers EasyDeLPlatforms "
        "EasyMethod TaskType EasyDeLOptimizers EasyDeLSchedulers"
    ),
    "easydel.infra.factory": (
        "get_config get_module register_config register_module TaskType registry ConfigType "
        "Registry"
    ),
    "easydel.infra.loss_utils": "LossConfig cross_entropy_sum token_logprobs",
    "easydel.infra.mixins": "EasyBridgeMixin EasyGenerationMixin GenerateOutput BaseModuleProtocol",
    "easydel.infra.mixins.bridge": "EasyBridgeMixin",
    "easydel.infra.mixins.generation": "EasyGenerationMixin GenerateOutput",
    "easydel.infra.mixins.operation_cache": (
        "Cache CrossCache DenseCache HybridCache LayerCacheSpec PagedCache RecurrentCache "
        "RecurrentSpec StateSpec WindowCache"
    ),
    "easydel.infra.mixins.protocol": "BaseModuleProtocol LanguageModel",
    "easydel.infra.modeling_outputs": (
        "BaseModelOutput CausalLMOutput EmbeddingOutput Metric SequenceClassifierOutput"
    ),
    "easydel.infra.utils": "canonical_dtype MaskInfo create_mesh AttnMaskDetail ModuleCaches",
    "easydel.layers": (
        "EasyDeLQuantizationConfig Embed MoEMethods QuantizationType RMSNorm quantize"
    ),
    "easydel.layers.attention": (
        "AttentionMechanisms AttentionModule FlexibleAttentionModule MaskInfo"
    ),
    "easydel.layers.embeddings": "Embed",
    "easydel.layers.moe": "MoEMethods",
    "easydel.layers.norms": "RMSNorm",
    "easydel.layers.quantization": (
        "AttnMaskDetail BaseOperationConfig EasyDeLQuantizationConfig EasyQuantizer LoraSpec "
        "QArray quantize dequantize is_quantized QuantizationType"
    ),
    "easydel.layers.quantization.quantizers": (
        "EasyDeLQuantizationConfig EasyQuantizer QArray quantize dequantize is_quantized"
    ),
    "easydel.modules.auto": f"AutoEasyDeLConfig {_AUTO} get_modules_by_type",
    "easydel.modules.auto.auto_configuration": "AutoEasyDeLConfig get_modules_by_type",
    "easydel.modules.auto.auto_modeling": _AUTO,
    "easydel.operations": (
        "AttentionConfig AutoRegressiveDecodeAttn BaseOperationConfig BlockSparseAttentionConfig "
        "BlockSparseAttn FlashAttentionConfig FlashAttn OperationImpl OperationMetadata "
        "OperationRegistry PagedFlashAttn RaggedPageAttentionv2Config RaggedPageAttentionv3Config "
        "RaggedPageAttnV2 RaggedPageAttnV3 RingAttentionConfig RingAttn "
        "ScaledDotProductAttentionConfig ScaledDotProductAttn VanillaAttn"
    ),
    "easydel.operations.kernels": (
        "AutoRegressiveDecodeAttn BlockSparseAttn FlashAttn PagedFlashAttn RaggedPageAttnV2 "
        "RaggedPageAttnV3 RingAttn ScaledDotProductAttn VanillaAttn"
    ),
    "easydel.operations.kernels.blocksparse_attention": "BlockSparseAttn",
    "easydel.operations.kernels.decode_attention": "AutoRegressiveDecodeAttn",
    "easydel.operations.kernels.flash_attention": "FlashAttn",
    "easydel.operations.kernels.paged_flash_attention": "PagedFlashAttn",
    "easydel.operations.kernels.ragged_page_attention": "RaggedPageAttnV2 RaggedPageAttnV3",
    "easydel.operations.kernels.ring_attention": "RingAttn",
    "easydel.operations.kernels.scaled_dot_product_attention": "ScaledDotProductAttn",
    "easydel.operations.kernels.vanilla_attention": "VanillaAttn",
    "easydel.trainers.base_trainer": "BaseTrainer",
    "easydel.trainers.packer": "pack_sequences",
    "easydel.trainers.ray_scaler": "RayDistributedTrainer",
    "easydel.trainers.ray_scaler.distributed_trainer": "RayDistributedTrainer",
    "easydel.trainers.prompt_transforms": " ".join(TRANSFORM_NAMES),
    "easydel.trainers.trainer": "Trainer",
    "easydel.trainers.trainer.modeling_output": "TrainerOutput",
    "easydel.trainers.trainer.trainer": "Trainer",
    "easydel.trainers.trainer_protocol": "TrainerOutput",
    "easydel.trainers.training_configurations": "TrainingArguments",
    "easydel.utils.inference_mode": "is_inference_mode set_inference_mode",
    "easydel.utils.parameters_transformation": "ModelConverter StateDictConverter",
    "easydel.utils": "ePath ePathLike ejit traversals",
    "easydel.utils.compiling_utils": "ejit",
    **{
        f"easydel.trainers.{folder}{file}": " ".join(f"{stem}{end}" for end in ends)
        for folder, word, stem in _METHODS
        for file, ends in (
            ("", ("Config", "Trainer")),
            (f".{word}_config", ("Config",)),
            (f".{word}_trainer", ("Trainer",)),
        )
    },
}

_SPEECH = "ed_elarge.building.easydel_speech"
#: Module path -> names that only this module exports, and the modules here that define them.
PATH_NAMES: dict[str, dict[str, str]] = {
    "easydel.inference.vwhisper": {"run_server": _SPEECH},
    "easydel.inference.vwhisper.server": {"run_server": _SPEECH},
}
#: Module path of a program -> its function here.
PROGRAM_PATHS: dict[str, tuple[str, str]] = {
    "easydel.scripts.elarge": ("ed_elarge.__main__", "main"),
    "easydel.inference.vwhisper.cli": (_SPEECH, "main"),
}
