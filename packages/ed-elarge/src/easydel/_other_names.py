"""EasyDeL's names that differ from the names here: aliases, and names without a counterpart.

`COUNTERPARTS` contains names of `import easydel as ed` of EasyDeL 0.3, and the objects here that do
the same. `ABSENT` contains the names without a counterpart, with the reason; the reason is part of
the error of such a name. `tools.easydel_names` writes both tables to `docs/migrate/easydel.md`.
"""

from __future__ import annotations

_SPECS = "ed_infra.specs:BaseOperationConfig"
_ABILITY = "ed_layers.attention.kernel:Ability"
_PHIMOE = "ed_models.families.phimoe"
_GEMMA3, _GEMMA3_TEXT = "ed_models.families.gemma3", "ed_models.families.gemma3_text"
_GEMMA4, _LLAMA4 = "ed_models.families.gemma4", "ed_models.families.llama4"
_STATUS = "ed_esurge.core.request"

#: EasyDeL's class of a mechanism -> field of `Mechanism` and its value. The name is an object for
#: `ed.attend(..., mechanism=...)`.
MECHANISM_NAMES: dict[str, tuple[str, str]] = {
    "AutoRegressiveDecodeAttn": ("decode", "autoregressive_decodeattn"),
    "BlockSparseAttn": ("name", "blocksparse"),
    "FlashAttn": ("name", "flash_attn2"),
    "PagedFlashAttn": ("pages", "page_attention"),
    "RaggedPageAttnV2": ("pages", "ragged_page_attention_v2"),
    "RaggedPageAttnV3": ("pages", "ragged_page_attention_v3"),
    "RingAttn": ("name", "ring"),
    "ScaledDotProductAttn": ("name", "sdpa"),
    "VanillaAttn": ("name", "vanilla"),
}

#: EasyDeL's transforms of rows.
TRANSFORM_NAMES = tuple(
    f"{method}PreprocessTransform"
    for method in ("BCO", "CPO", "DPO", "GRPO", "KTO", "ORPO", "PPO", "Reward", "SFT")
)
_TRANSFORMS = "ed_elarge.building.row_transforms"
#: Objects whose form differs here.
OBJECT_NAMES = (
    "AutoShardAndGatherFunctions EasyQuantizer Mistral3Tokenizer ModelConverter Registry "
    "StateDictConverter pack_sequences"
)

#: Name of EasyDeL -> module and name here.
COUNTERPARTS: dict[str, str] = {
    # Enums and small types.
    "AttentionMechanisms": "ed_infra.enums",
    "MoEMethods": "ed_infra.enums",
    "QuantizationType": "ed_infra.enums",
    "ConfigType": "ed_infra.enums",
    "EasyDeLOptimizers": "ed_trainers.options.optimizers",
    "EasyDeLSchedulers": "ed_trainers.options.optimizers",
    "EasyDeLRuntimeError": "ed_infra.errors:EasyDeLError",
    "EasyDeLSyntaxRuntimeError": "ed_infra.errors:ConfigError",
    "PyTree": "flax.struct:PyTreeNode",
    "auto_pytree": "flax.struct:dataclass",
    "Rngs": "flax.nnx:Rngs",
    "ejit": "jax:jit",
    "ePath": "etils.epath:Path",
    "ePathLike": "etils.epath:PathLike",
    "traversals": "flax.traverse_util:*",
    # Kernels.
    "AttentionModule": "ed_layers.attention.blocks.self_attention:SelfAttention",
    "FlexibleAttentionModule": "ed_layers.attention.mechanism:Mechanism",
    "OperationRegistry": "ed_layers.attention.kernels:kernels",
    "OperationImpl": "ed_layers.attention.kernel:Kernel",
    "AttentionOutput": "ed_layers.attention.dispatch",
    "OperationMetadata": "ed_layers.attention.kernel:Settings",
    "AttentionConfig": _SPECS,
    "BlockSparseAttentionConfig": _SPECS,
    "FlashAttentionConfig": _SPECS,
    "RaggedPageAttentionv2Config": _SPECS,
    "RaggedPageAttentionv3Config": _SPECS,
    "RingAttentionConfig": _SPECS,
    "ScaledDotProductAttentionConfig": _SPECS,
    **dict.fromkeys(MECHANISM_NAMES, "easydel._found"),
    # Models.
    "get_modules_by_type": "ed_infra.registry",
    "AutoStateForImageSequenceClassification": (
        "ed_trainers.auto_state:AutoStateForImageClassification"
    ),
    "DbrxAttentionConfig": "transformers.models.dbrx.configuration_dbrx",
    "DbrxFFNConfig": "transformers.models.dbrx.configuration_dbrx",
    "MptAttentionConfig": "transformers.models.mpt.configuration_mpt",
    "PhiMoeConfig": f"{_PHIMOE}:PhimoeConfig",
    "PhiMoeModel": f"{_PHIMOE}:PhimoeModel",
    "PhiMoeForCausalLM": f"{_PHIMOE}:PhimoeForCausalLM",
    # EasyDeL's and Hugging Face's `Gemma3Config` is that of images and text.
    "Gemma3Config": f"{_GEMMA3}:Gemma3MultimodalConfig",
    "Gemma3Model": f"{_GEMMA3}:Gemma3MultimodalModel",
    "Gemma3MultiModalProjector": f"{_GEMMA3}:Gemma3Projector",
    "Gemma3TextConfig": f"{_GEMMA3_TEXT}:Gemma3Config",
    "Gemma3TextModel": f"{_GEMMA3_TEXT}:Gemma3Model",
    "Gemma4ForCausalLM": "ed_models.families.gemma4_text:Gemma4TextForCausalLM",
    "Gemma4VisionModel": f"{_GEMMA4}:Gemma4VisionTower",
    "Gemma4RMSNorm": "ed_layers.norms:RMSNorm",
    "Llama4ForCausalLM": f"{_LLAMA4}:Llama4TextForCausalLM",
    "Llama4ForSequenceClassification": "easydel._found:Llama4TextForSequenceClassification",
    "Glm4vVisionModel": "ed_models.body.patch_tower:PatchTower",
    "Glm4vMoeVisionModel": "ed_models.body.patch_tower:PatchTower",
    "Qwen3VisionTransformerPretrainedModel": "ed_models.body.patch_tower:PatchTower",
    "Qwen3VLMoeVisionTransformerPretrainedModel": "ed_models.body.patch_tower:PatchTower",
    # Engine.
    "EngineRequest": f"{_STATUS}:Request",
    "EngineRequestStatus": f"{_STATUS}:Status",
    "JitableSamplingParams": "ed_esurge.runner.sampler_rows:SamplerRows",
    "eSurgeRunner": "ed_esurge.runner.model_runner:ModelRunner",
    "eSurgeApiServer": "ed_esurge.server.launch",
    "eSurgeLMEvalAdapter": "ed_esurge.lm_eval:eSurgeLM",
    "ToolParser": "ed_esurge.replies.parser:ReplyParser",
    "ToolParserManager": "ed_esurge.replies.tool_formats:TOOL_FORMATS",
    "vWhisperInference": "ed_elarge.building.easydel_speech",
    "vWhisperInferenceConfig": "ed_elarge.building.easydel_speech",
    "WhisperTimeStampLogitsProcessor": "ed_models.generation.timestamps:TimestampRules",
    "init_cluster": "ed_infra.distributed:initialize",
    # Trainers and losses.
    "LossConfig": "ed_elarge.building.easydel_training",
    "RayDistributedTrainer": "ed_elarge.building.easydel_training",
    "BaseTrainer": "ed_trainers.trainer:Trainer",
    "BenchmarkConfig": "ed_elarge.config.action_options",
    **dict.fromkeys(TRANSFORM_NAMES, _TRANSFORMS),
    "prompt_transforms": f"{_TRANSFORMS}:*",
    **dict.fromkeys(OBJECT_NAMES.split(), "ed_elarge.building.easydel_objects"),
    "EasyDeLTimerError": "ed_infra.errors:EasyDeLError",
    "is_inference_mode": "ed_layers.dropout:is_dropout_disabled",
    "set_inference_mode": "ed_layers.dropout:disable_dropout",
    # Further names of submodules.
    "TextDatasetInform": "ed_data:Inform",
    "VisualDatasetInform": "ed_data:Inform",
    "BaseDatasetInform": "ed_data:Inform",
    "DatasetMixture": "ed_data:Mixture",
    "DatasetLoadError": "ed_data:DataError",
    "build_dataset": "ed_data:build_loader",
    "RequestOutput": "ed_esurge.outputs",
    "CompletionOutput": "ed_esurge.outputs",
    "registry": "ed_infra.registry:*",
    "EngineConfig": "ed_esurge.config",
}

_OMNI = "Qwen3-Omni is not implemented; for sound and text use Qwen2AudioForConditionalGeneration"
_XERXES = "a model of EasyDeL's author without published weights; no other library has the family"
_DIFFUSION = "language models that denoise text are not implemented"
_SPARSE = "use SparseMLP of ed_layers.moe.layer, which has a Router and Experts"
_MOSHPIT = "use grpo with `trainer.environment` (docs/tasks/asynchronous_rl.md)"


def _same(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


#: Name of EasyDeL without a counterpart -> what to use instead.
ABSENT: dict[str, str] = {
    "TensorConverter": "use torch.from_numpy(numpy.array(x)) and jax.numpy.asarray(x)",
    "TurboQuantConfig": "TurboQuant is not implemented; kv_cache_quantization_config has 8 bits",
    **_same("AgenticMoshPitConfig AgenticMoshPitTrainer", _MOSHPIT),
    **_same(
        "layers.moe.BaseMoeModule layers.moe.MoeFusedHooks layers.moe.MoeMetrics "
        "layers.moe.MoeLoadBalancingStrategy layers.moe.MoeRoutingStrategy "
        "layers.moe.get_moe_partition_spec",
        _SPARSE,
    ),
    "layers.quantization.BaseQuantizer": (
        "formats are a table (ed_layers.quantization.formats); EasyDeL 0.3 does not have the class "
        "that its page names"
    ),
    "trainers.TrainerConfigureFunctionOutput": (
        "a method is a record of functions (ed_trainers.contract.Method, docs/methods.md)"
    ),
    "InferenceApiRouter": "ed.serve accepts a mapping of names to engines",
    "CLIPTextModelWithProjection": "use CLIPModel, which embeds texts and images",
    "Gemma4MultimodalEmbedder": "its two layers are part of Gemma4Model",
    "RobertaForCausalLM": "roberta is an encoder here; use a decoder for causal language models",
    "WhisperForAudioClassification": "use AutoEasyDeLModelForAudioClassification with wav2vec2",
    **_same(
        "KimiVLConfig KimiVLForConditionalGeneration MoonViTConfig modules.kimi_vl",
        "use KimiK25ForConditionalGeneration; Kimi-VL is not implemented",
    ),
    **_same(
        "Qwen3OmniMoeAudioConfig Qwen3OmniMoeAudioEncoder Qwen3OmniMoeAudioEncoderConfig "
        "Qwen3OmniMoeCode2Wav Qwen3OmniMoeCode2WavConfig Qwen3OmniMoeConfig "
        "Qwen3OmniMoeForConditionalGeneration Qwen3OmniMoeModel "
        "Qwen3OmniMoeTalkerCodePredictorConfig "
        "Qwen3OmniMoeTalkerCodePredictorForConditionalGeneration "
        "Qwen3OmniMoeTalkerCodePredictorModel Qwen3OmniMoeTalkerConfig "
        "Qwen3OmniMoeTalkerForConditionalGeneration Qwen3OmniMoeTalkerTextConfig "
        "Qwen3OmniMoeTextConfig Qwen3OmniMoeThinkerConfig "
        "Qwen3OmniMoeThinkerForConditionalGeneration Qwen3OmniMoeThinkerModel "
        "Qwen3OmniMoeVisionConfig Qwen3OmniMoeVisionEncoder Qwen3OmniMoeVisionEncoderConfig "
        "modules.qwen3_omni_moe",
        _OMNI,
    ),
    **_same(
        "XerxesConfig XerxesForCausalLM XerxesModel Xerxes2Config Xerxes2ForCausalLM "
        "Xerxes2Model modules.xerxes modules.xerxes2",
        _XERXES,
    ),
    **_same(
        "AutoEasyDeLModelForDiffusionLM AutoStateForDiffusionLM GiddConfig GiddForDiffusionLM "
        "GiddModel modules.gidd",
        _DIFFUSION,
    ),
}

#: The modules of families, `easydel.modules.<name>`.
FAMILY_MODULES = (
    "arctic aya_vision clip cohere cohere2 dbrx deepseek_v2 deepseek_v3 exaone exaone4 falcon "
    "falcon_h1 falcon_mamba gemma gemma2 gemma3 gemma4 glm glm46v glm4 glm4_moe glm4_moe_lite "
    "glm4v glm4v_moe glm_moe_dsa gpt2 gpt_j gpt_neox gpt_oss grok_1 internlm2 kimi_linear llama "
    "llama4 llava mamba mamba2 minimax mistral mistral3 mixtral mosaic_mpt olmo olmo2 olmo3 "
    "openelm opt phi phi3 phimoe pixtral qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe "
    "qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe roberta rwkv seed_oss siglip smollm3 stablelm "
    "whisper"
)
#: Module of EasyDeL -> the files of its family here, where the names differ.
FAMILY_FILES: dict[str, tuple[str, ...]] = {
    "gemma3": ("gemma3", "gemma3_text"),
    "gemma4": ("gemma4", "gemma4_text"),
    "glm46v": ("glm4v",),
    "glm4v_moe": ("glm4_moe",),
    "gpt_j": ("gptj",),
    "mosaic_mpt": ("mpt",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
#: Module of EasyDeL -> the word in the names of its two files, where it differs.
FAMILY_WORDS: dict[str, str] = {
    "deepseek_v2": "deepseek", "deepseek_v3": "deepseek", "mosaic_mpt": "mosaic", "qwen2": "qwen",
}  # fmt: skip
