# Written by tools/easydel_stub.py.
# ruff: noqa
# fmt: off
from types import ModuleType
from ed_trainers import ARGUMENTS as ARGUMENTS
from ed_infra.enums import AVAILABLE_ATTENTION_MECHANISMS as AVAILABLE_ATTENTION_MECHANISMS
from ed_infra.enums import AVAILABLE_GRADIENT_CHECKPOINT_TARGETS as AVAILABLE_GRADIENT_CHECKPOINT_TARGETS
from ed_infra.enums import AVAILABLE_MOE_METHODS as AVAILABLE_MOE_METHODS
from ed_infra import AXIS_NAMES as AXIS_NAMES
from ed_models.families.afmoe import AfmoeConfig as AfmoeConfig
from ed_models.families.afmoe import AfmoeDecoderLayer as AfmoeDecoderLayer
from ed_models.families.afmoe import AfmoeForCausalLM as AfmoeForCausalLM
from ed_models.families.afmoe import AfmoeModel as AfmoeModel
from ed_models.families.albert import AlbertConfig as AlbertConfig
from ed_models.families.albert import AlbertForMaskedLM as AlbertForMaskedLM
from ed_models.families.albert import AlbertModel as AlbertModel
from ed_models.families.apertus import ApertusConfig as ApertusConfig
from ed_models.families.apertus import ApertusDecoderLayer as ApertusDecoderLayer
from ed_models.families.apertus import ApertusForCausalLM as ApertusForCausalLM
from ed_models.families.apertus import ApertusModel as ApertusModel
from ed_models.families.arcee import ArceeConfig as ArceeConfig
from ed_models.families.arcee import ArceeDecoderLayer as ArceeDecoderLayer
from ed_models.families.arcee import ArceeForCausalLM as ArceeForCausalLM
from ed_models.families.arcee import ArceeModel as ArceeModel
from ed_models.families.arctic import ArcticConfig as ArcticConfig
from ed_models.families.arctic import ArcticDecoderLayer as ArcticDecoderLayer
from ed_models.families.arctic import ArcticForCausalLM as ArcticForCausalLM
from ed_models.families.arctic import ArcticModel as ArcticModel
from ed_esurge import AsyncEngine as AsyncEngine
from ed_infra.specs import BaseOperationConfig as _AttentionConfig
from ed_infra.enums import AttentionMechanisms as AttentionMechanisms
from ed_layers.attention.blocks.self_attention import SelfAttention as _AttentionModule
from ed_layers.attention.dispatch import AttentionOutput as AttentionOutput
from ed_infra import AttnMaskDetail as AttnMaskDetail
from ed_models import AutoEasyDeLAnyToAnyModel as AutoEasyDeLAnyToAnyModel
from ed_models import AutoEasyDeLConfig as AutoEasyDeLConfig
from ed_models import AutoEasyDeLModel as AutoEasyDeLModel
from ed_models import AutoEasyDeLModelForAudioClassification as AutoEasyDeLModelForAudioClassification
from ed_models import AutoEasyDeLModelForCTC as AutoEasyDeLModelForCTC
from ed_models import AutoEasyDeLModelForCausalLM as AutoEasyDeLModelForCausalLM
from ed_models import AutoEasyDeLModelForEmbedding as AutoEasyDeLModelForEmbedding
from ed_models import AutoEasyDeLModelForImageClassification as AutoEasyDeLModelForImageClassification
from ed_models import AutoEasyDeLModelForImageTextToText as AutoEasyDeLModelForImageTextToText
from ed_models import AutoEasyDeLModelForMaskedLM as AutoEasyDeLModelForMaskedLM
from ed_models import AutoEasyDeLModelForMultipleChoice as AutoEasyDeLModelForMultipleChoice
from ed_models import AutoEasyDeLModelForQuestionAnswering as AutoEasyDeLModelForQuestionAnswering
from ed_models import AutoEasyDeLModelForReward as AutoEasyDeLModelForReward
from ed_models import AutoEasyDeLModelForSeq2SeqLM as AutoEasyDeLModelForSeq2SeqLM
from ed_models import AutoEasyDeLModelForSequenceClassification as AutoEasyDeLModelForSequenceClassification
from ed_models import AutoEasyDeLModelForSpeechSeq2Seq as AutoEasyDeLModelForSpeechSeq2Seq
from ed_models import AutoEasyDeLModelForTokenClassification as AutoEasyDeLModelForTokenClassification
from ed_models import AutoEasyDeLModelForZeroShotImageClassification as AutoEasyDeLModelForZeroShotImageClassification
from ed_models import AutoEasyDeLVisionModel as AutoEasyDeLVisionModel
from ed_elarge.building.easydel_objects import AutoShardAndGatherFunctions as AutoShardAndGatherFunctions
from ed_trainers.auto_state import AutoState as AutoState
from ed_models.families.aya_vision import AyaVisionConfig as AyaVisionConfig
from ed_models.families.aya_vision import AyaVisionForConditionalGeneration as AyaVisionForConditionalGeneration
from ed_models.families.aya_vision import AyaVisionModel as AyaVisionModel
from ed_models.families.aya_vision import AyaVisionProjector as AyaVisionProjector
from ed_trainers.options.preference import BCOArguments as BCOArguments
from ed_trainers.options.preference import BCOArguments as _BCOConfig
from ed_elarge.building.row_transforms import BCOPreprocessTransform as BCOPreprocessTransform
from ed_trainers.methods.bco import BCOTrainer as BCOTrainer
from ed_models.families.bamba import BambaConfig as BambaConfig
from ed_models.families.bamba import BambaDecoderLayer as BambaDecoderLayer
from ed_models.families.bamba import BambaForCausalLM as BambaForCausalLM
from ed_models.families.bamba import BambaModel as BambaModel
from ed_models.families.bart import BartConfig as BartConfig
from ed_models.families.bart import BartForConditionalGeneration as BartForConditionalGeneration
from ed_models.families.bart import BartModel as BartModel
from ed_data import Inform as _BaseDatasetInform
from ed_infra import BaseModelOutput as BaseModelOutput
from ed_models.protocol import LanguageModel as _BaseModuleProtocol
from ed_infra import BaseOperationConfig as BaseOperationConfig
from ed_trainers.trainer import Trainer as _BaseTrainer
from ed_elarge.config.action_options import BenchmarkConfig as BenchmarkConfig
from ed_models.families.bert import BertConfig as BertConfig
from ed_models.families.bert import BertForMaskedLM as BertForMaskedLM
from ed_models.families.bert import BertModel as BertModel
from ed_models.families.biogpt import BioGptConfig as BioGptConfig
from ed_models.families.biogpt import BioGptDecoderLayer as BioGptDecoderLayer
from ed_models.families.biogpt import BioGptForCausalLM as BioGptForCausalLM
from ed_models.families.biogpt import BioGptModel as BioGptModel
from ed_infra.specs import BaseOperationConfig as _BlockSparseAttentionConfig
from ed_models.families.bloom import BloomConfig as BloomConfig
from ed_models.families.bloom import BloomDecoderLayer as BloomDecoderLayer
from ed_models.families.bloom import BloomForCausalLM as BloomForCausalLM
from ed_models.families.bloom import BloomModel as BloomModel
from ed_models.families.clip import CLIPConfig as CLIPConfig
from ed_models.families.clip import CLIPForImageClassification as CLIPForImageClassification
from ed_models.families.clip import CLIPModel as CLIPModel
from ed_models.families.clip import CLIPTextConfig as CLIPTextConfig
from ed_models.families.clip import CLIPTextModel as CLIPTextModel
from ed_models.families.clip import CLIPVisionConfig as CLIPVisionConfig
from ed_models.families.clip import CLIPVisionModel as CLIPVisionModel
from ed_trainers.options.preference import CPOArguments as CPOArguments
from ed_trainers.options.preference import CPOArguments as _CPOConfig
from ed_elarge.building.row_transforms import CPOPreprocessTransform as CPOPreprocessTransform
from ed_trainers.methods.cpo import CPOTrainer as CPOTrainer
from ed_trainers.options.supervised import CTCArguments as CTCArguments
from ed_trainers.options.supervised import CTCArguments as _CTCConfig
from ed_trainers.methods.ctc import CTCTrainer as CTCTrainer
from ed_layers.cache.protocol import Cache as Cache
from ed_trainers import Callback as Callback
from ed_infra import CausalLMOutput as CausalLMOutput
from ed_infra import CheckpointError as CheckpointError
from ed_trainers import CheckpointManager as CheckpointManager
from ed_models.families.codegen import CodeGenConfig as CodeGenConfig
from ed_models.families.codegen import CodeGenDecoderLayer as CodeGenDecoderLayer
from ed_models.families.codegen import CodeGenForCausalLM as CodeGenForCausalLM
from ed_models.families.codegen import CodeGenModel as CodeGenModel
from ed_models.families.cohere2 import Cohere2Config as Cohere2Config
from ed_models.families.cohere2 import Cohere2DecoderLayer as Cohere2DecoderLayer
from ed_models.families.cohere2 import Cohere2ForCausalLM as Cohere2ForCausalLM
from ed_models.families.cohere2 import Cohere2Model as Cohere2Model
from ed_models.families.cohere2_moe import Cohere2MoeConfig as Cohere2MoeConfig
from ed_models.families.cohere2_moe import Cohere2MoeDecoderLayer as Cohere2MoeDecoderLayer
from ed_models.families.cohere2_moe import Cohere2MoeForCausalLM as Cohere2MoeForCausalLM
from ed_models.families.cohere2_moe import Cohere2MoeModel as Cohere2MoeModel
from ed_models.families.cohere2_moe import Cohere2MoeSparse as Cohere2MoeSparse
from ed_models.families.cohere2_vision import Cohere2VisionConfig as Cohere2VisionConfig
from ed_models.families.cohere2_vision import Cohere2VisionForConditionalGeneration as Cohere2VisionForConditionalGeneration
from ed_models.families.cohere2_vision import Cohere2VisionModel as Cohere2VisionModel
from ed_models.families.cohere import CohereConfig as CohereConfig
from ed_models.families.cohere import CohereDecoderLayer as CohereDecoderLayer
from ed_models.families.cohere import CohereForCausalLM as CohereForCausalLM
from ed_models.families.cohere import CohereModel as CohereModel
from ed_data import Column as Column
from ed_esurge.outputs import CompletionOutput as CompletionOutput
from ed_infra import ConfigError as ConfigError
from ed_infra.enums import ConfigType as ConfigType
from ed_models.families.apertus import Constant as Constant
from ed_trainers.options.supervised import ContrastiveArguments as ContrastiveArguments
from ed_trainers.options.supervised import ContrastiveArguments as _ContrastiveConfig
from ed_trainers.methods.contrastive import ContrastiveTrainer as ContrastiveTrainer
from ed_layers import CrossCache as CrossCache
from ed_trainers.options.supervised import CrossEncoderArguments as CrossEncoderArguments
from ed_trainers.options.supervised import CrossEncoderArguments as _CrossEncoderConfig
from ed_trainers.methods.cross_encoder import CrossEncoderTrainer as CrossEncoderTrainer
from ed_layers import Ctx as Ctx
from ed_models.families.cwm import CwmConfig as CwmConfig
from ed_models.families.cwm import CwmDecoderLayer as CwmDecoderLayer
from ed_models.families.cwm import CwmForCausalLM as CwmForCausalLM
from ed_models.families.cwm import CwmModel as CwmModel
from ed_models.families.dinov3_vit import DINOv3Layer as DINOv3Layer
from ed_models.families.dinov3_vit import DINOv3ViTConfig as DINOv3ViTConfig
from ed_models.families.dinov3_vit import DINOv3ViTModel as DINOv3ViTModel
from ed_trainers import DPOArguments as DPOArguments
from ed_trainers.options.preference import DPOArguments as _DPOConfig
from ed_elarge.building.row_transforms import DPOPreprocessTransform as DPOPreprocessTransform
from ed_trainers.methods.dpo import DPOTrainer as DPOTrainer
from ed_data import DataError as DataError
from ed_data import DataError as _DatasetLoadError
from ed_data import Mixture as _DatasetMixture
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig as DbrxAttentionConfig
from ed_models.families.dbrx import DbrxConfig as DbrxConfig
from ed_models.families.dbrx import DbrxDecoderLayer as DbrxDecoderLayer
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig as DbrxFFNConfig
from ed_models.families.dbrx import DbrxForCausalLM as DbrxForCausalLM
from ed_models.families.dbrx import DbrxModel as DbrxModel
from ed_models.families.dbrx import DbrxRouter as DbrxRouter
from ed_models.families.deberta_v2 import DebertaV2Config as DebertaV2Config
from ed_models.families.deberta_v2 import DebertaV2ForMaskedLM as DebertaV2ForMaskedLM
from ed_models.families.deberta_v2 import DebertaV2Layer as DebertaV2Layer
from ed_models.families.deberta_v2 import DebertaV2Model as DebertaV2Model
from ed_models.families.deepseek_v2 import DeepseekV2Config as DeepseekV2Config
from ed_models.families.deepseek_v2 import DeepseekV2DecoderLayer as DeepseekV2DecoderLayer
from ed_models.families.deepseek_v2 import DeepseekV2ForCausalLM as DeepseekV2ForCausalLM
from ed_models.families.deepseek_v2 import DeepseekV2Model as DeepseekV2Model
from ed_models.families.deepseek_v32 import DeepseekV32Config as DeepseekV32Config
from ed_models.families.deepseek_v32 import DeepseekV32DecoderLayer as DeepseekV32DecoderLayer
from ed_models.families.deepseek_v32 import DeepseekV32ForCausalLM as DeepseekV32ForCausalLM
from ed_models.families.deepseek_v32 import DeepseekV32Model as DeepseekV32Model
from ed_models.families.deepseek_v3 import DeepseekV3Config as DeepseekV3Config
from ed_models.families.deepseek_v3 import DeepseekV3DecoderLayer as DeepseekV3DecoderLayer
from ed_models.families.deepseek_v3 import DeepseekV3ForCausalLM as DeepseekV3ForCausalLM
from ed_models.families.deepseek_v3 import DeepseekV3Model as DeepseekV3Model
from ed_models.families.deepseek_vl import DeepseekVLAligner as DeepseekVLAligner
from ed_models.families.deepseek_vl import DeepseekVLConfig as DeepseekVLConfig
from ed_models.families.deepseek_vl import DeepseekVLForConditionalGeneration as DeepseekVLForConditionalGeneration
from ed_models.families.deepseek_vl import DeepseekVLModel as DeepseekVLModel
from ed_models.families.deit import DeiTConfig as DeiTConfig
from ed_models.families.deit import DeiTForImageClassification as DeiTForImageClassification
from ed_models.families.deit import DeiTModel as DeiTModel
from ed_layers import DenseCache as DenseCache
from ed_models.families.dinov2 import Dinov2Config as Dinov2Config
from ed_models.families.dinov2 import Dinov2ForImageClassification as Dinov2ForImageClassification
from ed_models.families.dinov2 import Dinov2Model as Dinov2Model
from ed_models.families.dinov2_with_registers import Dinov2WithRegistersConfig as Dinov2WithRegistersConfig
from ed_models.families.dinov2_with_registers import Dinov2WithRegistersForImageClassification as Dinov2WithRegistersForImageClassification
from ed_models.families.dinov2_with_registers import Dinov2WithRegistersModel as Dinov2WithRegistersModel
from ed_models.families.distilbert import DistilBertConfig as DistilBertConfig
from ed_models.families.distilbert import DistilBertForMaskedLM as DistilBertForMaskedLM
from ed_models.families.distilbert import DistilBertModel as DistilBertModel
from ed_trainers.options.distillation import DistillationArguments as DistillationArguments
from ed_trainers.options.distillation import DistillationArguments as _DistillationConfig
from ed_trainers.methods.distillation import DistillationTrainer as DistillationTrainer
from ed_models.families.dots1 import Dots1Config as Dots1Config
from ed_models.families.dots1 import Dots1DecoderLayer as Dots1DecoderLayer
from ed_models.families.dots1 import Dots1ForCausalLM as Dots1ForCausalLM
from ed_models.families.dots1 import Dots1Model as Dots1Model
from ed_trainers.options.distillation import DraftArguments as DraftArguments
from ed_trainers.options.distillation import DraftArguments as _DraftConfig
from ed_trainers.methods.draft import DraftTrainer as DraftTrainer
from ed_models import EasyBridgeMixin as EasyBridgeMixin
from ed_infra import EasyDeLBackends as EasyDeLBackends
from ed_infra import EasyDeLBaseConfig as EasyDeLBaseConfig
from ed_infra import EasyDeLBaseConfigDict as EasyDeLBaseConfigDict
from ed_models import EasyDeLBaseModule as EasyDeLBaseModule
from ed_infra import EasyDeLError as EasyDeLError
from ed_infra import EasyDeLGradientCheckPointers as EasyDeLGradientCheckPointers
from ed_trainers.options.optimizers import EasyDeLOptimizers as EasyDeLOptimizers
from ed_infra import EasyDeLPlatforms as EasyDeLPlatforms
from ed_infra import EasyDeLQuantizationConfig as EasyDeLQuantizationConfig
from ed_infra.errors import EasyDeLError as _EasyDeLRuntimeError
from ed_trainers.options.optimizers import EasyDeLSchedulers as EasyDeLSchedulers
from ed_trainers import EasyDeLState as EasyDeLState
from ed_infra.errors import ConfigError as _EasyDeLSyntaxRuntimeError
from ed_infra.errors import EasyDeLError as _EasyDeLTimerError
from ed_models import EasyGenerationMixin as EasyGenerationMixin
from ed_infra import EasyMethod as EasyMethod
from ed_elarge.building.easydel_objects import EasyQuantizer as EasyQuantizer
from ed_models.families.electra import ElectraConfig as ElectraConfig
from ed_models.families.electra import ElectraForMaskedLM as ElectraForMaskedLM
from ed_models.families.electra import ElectraModel as ElectraModel
from ed_layers import Embed as Embed
from ed_trainers.options.supervised import EmbeddingArguments as EmbeddingArguments
from ed_trainers.options.supervised import EmbeddingArguments as _EmbeddingConfig
from ed_infra import EmbeddingOutput as EmbeddingOutput
from ed_trainers.methods.embedding import EmbeddingTrainer as EmbeddingTrainer
from ed_esurge.config import EngineConfig as EngineConfig
from ed_esurge.core.request import Request as _EngineRequest
from ed_esurge.core.request import Status as _EngineRequestStatus
from ed_models.families.ernie4_5 import Ernie4_5Config as Ernie4_5Config
from ed_models.families.ernie4_5 import Ernie4_5DecoderLayer as Ernie4_5DecoderLayer
from ed_models.families.ernie4_5 import Ernie4_5ForCausalLM as Ernie4_5ForCausalLM
from ed_models.families.ernie4_5 import Ernie4_5Model as Ernie4_5Model
from ed_models.families.ernie4_5_moe import Ernie4_5_MoeConfig as Ernie4_5_MoeConfig
from ed_models.families.ernie4_5_moe import Ernie4_5_MoeDecoderLayer as Ernie4_5_MoeDecoderLayer
from ed_models.families.ernie4_5_moe import Ernie4_5_MoeForCausalLM as Ernie4_5_MoeForCausalLM
from ed_models.families.ernie4_5_moe import Ernie4_5_MoeModel as Ernie4_5_MoeModel
from ed_data import Example as Example
from ed_models.families.exaone4 import Exaone4Config as Exaone4Config
from ed_models.families.exaone4 import Exaone4DecoderLayer as Exaone4DecoderLayer
from ed_models.families.exaone4 import Exaone4ForCausalLM as Exaone4ForCausalLM
from ed_models.families.exaone4 import Exaone4Model as Exaone4Model
from ed_models.families.exaone4_5 import Exaone4_5Config as Exaone4_5Config
from ed_models.families.exaone4_5 import Exaone4_5ForConditionalGeneration as Exaone4_5ForConditionalGeneration
from ed_models.families.exaone4_5 import Exaone4_5Model as Exaone4_5Model
from ed_models.families.exaone4_5 import Exaone4_5VisionConfig as Exaone4_5VisionConfig
from ed_models.families.exaone import ExaoneConfig as ExaoneConfig
from ed_models.families.exaone import ExaoneDecoderLayer as ExaoneDecoderLayer
from ed_models.families.exaone import ExaoneForCausalLM as ExaoneForCausalLM
from ed_models.families.exaone import ExaoneModel as ExaoneModel
from ed_models.families.exaone_moe import ExaoneMoeConfig as ExaoneMoeConfig
from ed_models.families.exaone_moe import ExaoneMoeDecoderLayer as ExaoneMoeDecoderLayer
from ed_models.families.exaone_moe import ExaoneMoeForCausalLM as ExaoneMoeForCausalLM
from ed_models.families.exaone_moe import ExaoneMoeModel as ExaoneMoeModel
from ed_models.families.falcon import FalconConfig as FalconConfig
from ed_models.families.falcon import FalconForCausalLM as FalconForCausalLM
from ed_models.families.falcon_h1 import FalconH1Attention as FalconH1Attention
from ed_models.families.falcon_h1 import FalconH1Config as FalconH1Config
from ed_models.families.falcon_h1 import FalconH1DecoderLayer as FalconH1DecoderLayer
from ed_models.families.falcon_h1 import FalconH1ForCausalLM as FalconH1ForCausalLM
from ed_models.families.falcon_h1 import FalconH1MLP as FalconH1MLP
from ed_models.families.falcon_h1 import FalconH1Model as FalconH1Model
from ed_models.families.falcon_mamba import FalconMambaBlock as FalconMambaBlock
from ed_models.families.falcon_mamba import FalconMambaConfig as FalconMambaConfig
from ed_models.families.falcon_mamba import FalconMambaForCausalLM as FalconMambaForCausalLM
from ed_models.families.falcon_mamba import FalconMambaModel as FalconMambaModel
from ed_models.families.falcon import FalconModel as FalconModel
from ed_infra.specs import BaseOperationConfig as _FlashAttentionConfig
from ed_models.families.flex_olmo import FlexOlmoConfig as FlexOlmoConfig
from ed_models.families.flex_olmo import FlexOlmoDecoderLayer as FlexOlmoDecoderLayer
from ed_models.families.flex_olmo import FlexOlmoForCausalLM as FlexOlmoForCausalLM
from ed_models.families.flex_olmo import FlexOlmoModel as FlexOlmoModel
from ed_layers.attention.mechanism import Mechanism as _FlexibleAttentionModule
from ed_trainers.options.groups import GFPOArguments as GFPOArguments
from ed_trainers.options.groups import GFPOArguments as _GFPOConfig
from ed_trainers.methods.gfpo import GFPOTrainer as GFPOTrainer
from ed_trainers.options.distillation import GKDArguments as GKDArguments
from ed_trainers.options.distillation import GKDArguments as _GKDConfig
from ed_trainers.methods.gkd import GKDTrainer as GKDTrainer
from ed_models.families.gpt2 import GPT2Config as GPT2Config
from ed_models.families.gpt2 import GPT2DecoderLayer as GPT2DecoderLayer
from ed_models.families.gpt2 import GPT2LMHeadModel as GPT2LMHeadModel
from ed_models.families.gpt2 import GPT2Model as GPT2Model
from ed_models.families.gpt_bigcode import GPTBigCodeConfig as GPTBigCodeConfig
from ed_models.families.gpt_bigcode import GPTBigCodeDecoderLayer as GPTBigCodeDecoderLayer
from ed_models.families.gpt_bigcode import GPTBigCodeForCausalLM as GPTBigCodeForCausalLM
from ed_models.families.gpt_bigcode import GPTBigCodeModel as GPTBigCodeModel
from ed_models.families.gptj import GPTJConfig as GPTJConfig
from ed_models.families.gptj import GPTJDecoderLayer as GPTJDecoderLayer
from ed_models.families.gptj import GPTJForCausalLM as GPTJForCausalLM
from ed_models.families.gptj import GPTJModel as GPTJModel
from ed_models.families.gpt_neo import GPTNeoConfig as GPTNeoConfig
from ed_models.families.gpt_neo import GPTNeoDecoderLayer as GPTNeoDecoderLayer
from ed_models.families.gpt_neo import GPTNeoForCausalLM as GPTNeoForCausalLM
from ed_models.families.gpt_neo import GPTNeoModel as GPTNeoModel
from ed_models.families.gpt_neox import GPTNeoXConfig as GPTNeoXConfig
from ed_models.families.gpt_neox import GPTNeoXForCausalLM as GPTNeoXForCausalLM
from ed_models.families.gpt_neox import GPTNeoXModel as GPTNeoXModel
from ed_trainers.options.groups import GRPOArguments as GRPOArguments
from ed_trainers.options.groups import GRPOArguments as _GRPOConfig
from ed_elarge.building.row_transforms import GRPOPreprocessTransform as GRPOPreprocessTransform
from ed_trainers.methods.grpo import GRPOTrainer as GRPOTrainer
from ed_trainers.options.groups import GSPOArguments as GSPOArguments
from ed_trainers.options.groups import GSPOArguments as _GSPOConfig
from ed_trainers.methods.grpo import GSPOTrainer as GSPOTrainer
from ed_layers import GatedMLP as GatedMLP
from ed_models.families.gemma2 import Gemma2Config as Gemma2Config
from ed_models.families.gemma2 import Gemma2DecoderLayer as Gemma2DecoderLayer
from ed_models.families.gemma2 import Gemma2ForCausalLM as Gemma2ForCausalLM
from ed_models.families.gemma2 import Gemma2Model as Gemma2Model
from ed_models.families.gemma3 import Gemma3MultimodalConfig as _Gemma3Config
from ed_models.families.gemma3_text import Gemma3DecoderLayer as Gemma3DecoderLayer
from ed_models.families.gemma3_text import Gemma3ForCausalLM as Gemma3ForCausalLM
from ed_models.families.gemma3 import Gemma3ForConditionalGeneration as Gemma3ForConditionalGeneration
from ed_models.families.gemma3 import Gemma3MultimodalModel as _Gemma3Model
from ed_models.families.gemma3 import Gemma3Projector as _Gemma3MultiModalProjector
from ed_models.families.gemma3 import Gemma3MultimodalConfig as Gemma3MultimodalConfig
from ed_models.families.gemma3 import Gemma3MultimodalModel as Gemma3MultimodalModel
from ed_models.families.gemma3 import Gemma3Projector as Gemma3Projector
from ed_models.families.gemma3_text import Gemma3Config as _Gemma3TextConfig
from ed_models.families.gemma3_text import Gemma3Model as _Gemma3TextModel
from ed_models.families.gemma4 import Gemma4ClippableLinear as Gemma4ClippableLinear
from ed_models.families.gemma4 import Gemma4Config as Gemma4Config
from ed_models.families.gemma4_text import Gemma4TextForCausalLM as _Gemma4ForCausalLM
from ed_models.families.gemma4 import Gemma4ForConditionalGeneration as Gemma4ForConditionalGeneration
from ed_models.families.gemma4 import Gemma4Model as Gemma4Model
from ed_models.families.gemma4 import Gemma4Pooler as Gemma4Pooler
from ed_layers.norms import RMSNorm as _Gemma4RMSNorm
from ed_models.families.gemma4_text import Gemma4TextAttention as Gemma4TextAttention
from ed_models.families.gemma4_text import Gemma4TextConfig as Gemma4TextConfig
from ed_models.families.gemma4_text import Gemma4TextCtx as Gemma4TextCtx
from ed_models.families.gemma4_text import Gemma4TextDecoderLayer as Gemma4TextDecoderLayer
from ed_models.families.gemma4_text import Gemma4TextForCausalLM as Gemma4TextForCausalLM
from ed_models.families.gemma4_text import Gemma4TextModel as Gemma4TextModel
from ed_models.families.gemma4_text import Gemma4TextRouter as Gemma4TextRouter
from ed_models.families.gemma4 import Gemma4VisionAttention as Gemma4VisionAttention
from ed_models.families.gemma4 import Gemma4VisionConfig as Gemma4VisionConfig
from ed_models.families.gemma4 import Gemma4VisionLayer as Gemma4VisionLayer
from ed_models.families.gemma4 import Gemma4VisionTower as _Gemma4VisionModel
from ed_models.families.gemma4 import Gemma4VisionTower as Gemma4VisionTower
from ed_models.families.gemma import GemmaConfig as GemmaConfig
from ed_models.families.gemma import GemmaDecoderLayer as GemmaDecoderLayer
from ed_models.families.gemma import GemmaForCausalLM as GemmaForCausalLM
from ed_models.families.gemma import GemmaModel as GemmaModel
from ed_models import GenerateOutput as GenerateOutput
from ed_models.families.glm4v import Glm46VConfig as Glm46VConfig
from ed_models.families.glm4v import Glm46VForConditionalGeneration as Glm46VForConditionalGeneration
from ed_models.families.glm4v import Glm46VModel as Glm46VModel
from ed_models.families.glm4 import Glm4Config as Glm4Config
from ed_models.families.glm4 import Glm4DecoderLayer as Glm4DecoderLayer
from ed_models.families.glm4 import Glm4ForCausalLM as Glm4ForCausalLM
from ed_models.families.glm4 import Glm4Model as Glm4Model
from ed_models.families.glm4_moe import Glm4MoeConfig as Glm4MoeConfig
from ed_models.families.glm4_moe import Glm4MoeDecoderLayer as Glm4MoeDecoderLayer
from ed_models.families.glm4_moe import Glm4MoeForCausalLM as Glm4MoeForCausalLM
from ed_models.families.glm4_moe_lite import Glm4MoeLiteConfig as Glm4MoeLiteConfig
from ed_models.families.glm4_moe_lite import Glm4MoeLiteDecoderLayer as Glm4MoeLiteDecoderLayer
from ed_models.families.glm4_moe_lite import Glm4MoeLiteForCausalLM as Glm4MoeLiteForCausalLM
from ed_models.families.glm4_moe_lite import Glm4MoeLiteModel as Glm4MoeLiteModel
from ed_models.families.glm4_moe import Glm4MoeModel as Glm4MoeModel
from ed_models.families.glm4v import Glm4vConfig as Glm4vConfig
from ed_models.families.glm4v import Glm4vForConditionalGeneration as Glm4vForConditionalGeneration
from ed_models.families.glm4v import Glm4vModel as Glm4vModel
from ed_models.families.glm4_moe import Glm4vMoeConfig as Glm4vMoeConfig
from ed_models.families.glm4_moe import Glm4vMoeForConditionalGeneration as Glm4vMoeForConditionalGeneration
from ed_models.families.glm4_moe import Glm4vMoeModel as Glm4vMoeModel
from ed_models.families.glm4_moe import Glm4vMoeTextConfig as Glm4vMoeTextConfig
from ed_models.families.glm4_moe import Glm4vMoeTextForCausalLM as Glm4vMoeTextForCausalLM
from ed_models.families.glm4_moe import Glm4vMoeTextModel as Glm4vMoeTextModel
from ed_models.families.glm4_moe import Glm4vMoeVisionConfig as Glm4vMoeVisionConfig
from ed_models.body.patch_tower import PatchTower as _Glm4vMoeVisionModel
from ed_models.families.glm4v import Glm4vTextConfig as Glm4vTextConfig
from ed_models.families.glm4v import Glm4vTextDecoderLayer as Glm4vTextDecoderLayer
from ed_models.families.glm4v import Glm4vTextForCausalLM as Glm4vTextForCausalLM
from ed_models.families.glm4v import Glm4vTextModel as Glm4vTextModel
from ed_models.families.glm4v import Glm4vVisionConfig as Glm4vVisionConfig
from ed_models.body.patch_tower import PatchTower as _Glm4vVisionModel
from ed_models.families.glm import GlmConfig as GlmConfig
from ed_models.families.glm import GlmDecoderLayer as GlmDecoderLayer
from ed_models.families.glm import GlmForCausalLM as GlmForCausalLM
from ed_models.families.glm import GlmModel as GlmModel
from ed_models.families.glm_moe_dsa import GlmMoeDsaConfig as GlmMoeDsaConfig
from ed_models.families.glm_moe_dsa import GlmMoeDsaDecoderLayer as GlmMoeDsaDecoderLayer
from ed_models.families.glm_moe_dsa import GlmMoeDsaForCausalLM as GlmMoeDsaForCausalLM
from ed_models.families.glm_moe_dsa import GlmMoeDsaModel as GlmMoeDsaModel
from ed_models.families.gpt_oss import GptOssConfig as GptOssConfig
from ed_models.families.gpt_oss import GptOssDecoderLayer as GptOssDecoderLayer
from ed_models.families.gpt_oss import GptOssExperts as GptOssExperts
from ed_models.families.gpt_oss import GptOssForCausalLM as GptOssForCausalLM
from ed_models.families.gpt_oss import GptOssModel as GptOssModel
from ed_models.families.granite import GraniteConfig as GraniteConfig
from ed_models.families.granite import GraniteDecoderLayer as GraniteDecoderLayer
from ed_models.families.granite import GraniteForCausalLM as GraniteForCausalLM
from ed_models.families.granite import GraniteModel as GraniteModel
from ed_models.families.granitemoe import GraniteMoeConfig as GraniteMoeConfig
from ed_models.families.granitemoe import GraniteMoeDecoderLayer as GraniteMoeDecoderLayer
from ed_models.families.granitemoe import GraniteMoeForCausalLM as GraniteMoeForCausalLM
from ed_models.families.granitemoehybrid import GraniteMoeHybridConfig as GraniteMoeHybridConfig
from ed_models.families.granitemoehybrid import GraniteMoeHybridDecoderLayer as GraniteMoeHybridDecoderLayer
from ed_models.families.granitemoehybrid import GraniteMoeHybridForCausalLM as GraniteMoeHybridForCausalLM
from ed_models.families.granitemoehybrid import GraniteMoeHybridModel as GraniteMoeHybridModel
from ed_models.families.granitemoe import GraniteMoeModel as GraniteMoeModel
from ed_models.families.granitemoe_swa import GraniteMoeSWAConfig as GraniteMoeSWAConfig
from ed_models.families.granitemoe_swa import GraniteMoeSWADecoderLayer as GraniteMoeSWADecoderLayer
from ed_models.families.granitemoe_swa import GraniteMoeSWAForCausalLM as GraniteMoeSWAForCausalLM
from ed_models.families.granitemoe_swa import GraniteMoeSWAModel as GraniteMoeSWAModel
from ed_models.families.granitemoeshared import GraniteMoeSharedConfig as GraniteMoeSharedConfig
from ed_models.families.granitemoeshared import GraniteMoeSharedDecoderLayer as GraniteMoeSharedDecoderLayer
from ed_models.families.granitemoeshared import GraniteMoeSharedForCausalLM as GraniteMoeSharedForCausalLM
from ed_models.families.granitemoeshared import GraniteMoeSharedModel as GraniteMoeSharedModel
from ed_models.families.granite_swa import GraniteSWAConfig as GraniteSWAConfig
from ed_models.families.granite_swa import GraniteSWADecoderLayer as GraniteSWADecoderLayer
from ed_models.families.granite_swa import GraniteSWAForCausalLM as GraniteSWAForCausalLM
from ed_models.families.granite_swa import GraniteSWAModel as GraniteSWAModel
from ed_models.families.grok_1 import Grok1Config as Grok1Config
from ed_models.families.grok_1 import Grok1DecoderLayer as Grok1DecoderLayer
from ed_models.families.grok_1 import Grok1ForCausalLM as Grok1ForCausalLM
from ed_models.families.grok_1 import Grok1Model as Grok1Model
from ed_models.families.helium import HeliumConfig as HeliumConfig
from ed_models.families.helium import HeliumDecoderLayer as HeliumDecoderLayer
from ed_models.families.helium import HeliumForCausalLM as HeliumForCausalLM
from ed_models.families.helium import HeliumModel as HeliumModel
from ed_models.families.hunyuan_v1_dense import HunYuanDenseV1Config as HunYuanDenseV1Config
from ed_models.families.hunyuan_v1_dense import HunYuanDenseV1DecoderLayer as HunYuanDenseV1DecoderLayer
from ed_models.families.hunyuan_v1_dense import HunYuanDenseV1ForCausalLM as HunYuanDenseV1ForCausalLM
from ed_models.families.hunyuan_v1_dense import HunYuanDenseV1Model as HunYuanDenseV1Model
from ed_models.families.hunyuan_v1_moe import HunYuanMoEV1Config as HunYuanMoEV1Config
from ed_models.families.hunyuan_v1_moe import HunYuanMoEV1DecoderLayer as HunYuanMoEV1DecoderLayer
from ed_models.families.hunyuan_v1_moe import HunYuanMoEV1ForCausalLM as HunYuanMoEV1ForCausalLM
from ed_models.families.hunyuan_v1_moe import HunYuanMoEV1Model as HunYuanMoEV1Model
from ed_layers import HybridCache as HybridCache
from ed_models.families.hyperclovax import HyperCLOVAXConfig as HyperCLOVAXConfig
from ed_models.families.hyperclovax import HyperCLOVAXDecoderLayer as HyperCLOVAXDecoderLayer
from ed_models.families.hyperclovax import HyperCLOVAXForCausalLM as HyperCLOVAXForCausalLM
from ed_models.families.hyperclovax import HyperCLOVAXModel as HyperCLOVAXModel
from ed_models.families.iquestcoder import IQuestCoderConfig as IQuestCoderConfig
from ed_models.families.iquestcoder import IQuestCoderDecoderLayer as IQuestCoderDecoderLayer
from ed_models.families.iquestcoder import IQuestCoderForCausalLM as IQuestCoderForCausalLM
from ed_models.families.iquestcoder import IQuestCoderModel as IQuestCoderModel
from ed_trainers.options.distillation import IWOPDArguments as IWOPDArguments
from ed_trainers.options.distillation import IWOPDArguments as _IWOPDConfig
from ed_trainers.methods.iw_opd import IWOPDTrainer as IWOPDTrainer
from ed_models.families.idefics3 import Idefics3Config as Idefics3Config
from ed_models.families.idefics3 import Idefics3Connector as Idefics3Connector
from ed_models.families.idefics3 import Idefics3ForConditionalGeneration as Idefics3ForConditionalGeneration
from ed_models.families.idefics3 import Idefics3Model as Idefics3Model
from ed_models.families.idefics3 import Idefics3VisionConfig as Idefics3VisionConfig
from ed_models.families.idefics3 import Idefics3VisionTower as Idefics3VisionTower
from ed_trainers.options.supervised import ImageClassificationArguments as ImageClassificationArguments
from ed_trainers.options.supervised import ImageClassificationArguments as _ImageClassificationConfig
from ed_trainers.methods.image_classification import ImageClassificationTrainer as ImageClassificationTrainer
from ed_data import Inform as Inform
from ed_elarge import InputError as InputError
from ed_models.families.internlm2 import InternLM2Config as InternLM2Config
from ed_models.families.internlm2 import InternLM2DecoderLayer as InternLM2DecoderLayer
from ed_models.families.internlm2 import InternLM2ForCausalLM as InternLM2ForCausalLM
from ed_models.families.internlm2 import InternLM2Model as InternLM2Model
from ed_models.families.internlm3 import InternLM3Config as InternLM3Config
from ed_models.families.internlm3 import InternLM3DecoderLayer as InternLM3DecoderLayer
from ed_models.families.internlm3 import InternLM3ForCausalLM as InternLM3ForCausalLM
from ed_models.families.internlm3 import InternLM3Model as InternLM3Model
from ed_models.families.internvl import InternVLConfig as InternVLConfig
from ed_models.families.internvl import InternVLForConditionalGeneration as InternVLForConditionalGeneration
from ed_models.families.internvl import InternVLModel as InternVLModel
from ed_models.families.internvl import InternVLProjector as InternVLProjector
from ed_models.families.internvl import InternVLVisionConfig as InternVLVisionConfig
from ed_models.families.internvl import InternVLVisionLayer as InternVLVisionLayer
from ed_models.families.internvl import InternVLVisionModel as InternVLVisionModel
from ed_models.families.jais2 import Jais2Config as Jais2Config
from ed_models.families.jais2 import Jais2DecoderLayer as Jais2DecoderLayer
from ed_models.families.jais2 import Jais2ForCausalLM as Jais2ForCausalLM
from ed_models.families.jais2 import Jais2Model as Jais2Model
from ed_models.families.jamba import JambaConfig as JambaConfig
from ed_models.families.jamba import JambaDecoderLayer as JambaDecoderLayer
from ed_models.families.jamba import JambaForCausalLM as JambaForCausalLM
from ed_models.families.jamba import JambaModel as JambaModel
from ed_esurge.runner.sampler_rows import SamplerRows as _JitableSamplingParams
from ed_trainers.options.preference import KTOArguments as KTOArguments
from ed_trainers.options.preference import KTOArguments as _KTOConfig
from ed_elarge.building.row_transforms import KTOPreprocessTransform as KTOPreprocessTransform
from ed_trainers.methods.kto import KTOTrainer as KTOTrainer
from ed_models.families.kimi_k25 import KimiK25Config as KimiK25Config
from ed_models.families.kimi_k25 import KimiK25ForConditionalGeneration as KimiK25ForConditionalGeneration
from ed_models.families.kimi_k25 import KimiK25Model as KimiK25Model
from ed_models.families.kimi_k25 import KimiK25VisionConfig as KimiK25VisionConfig
from ed_models.families.deepseek_v3 import KimiK2Config as KimiK2Config
from ed_models.families.deepseek_v3 import KimiK2ForCausalLM as KimiK2ForCausalLM
from ed_models.families.deepseek_v3 import KimiK2Model as KimiK2Model
from ed_models.families.kimi_linear import KimiLinearConfig as KimiLinearConfig
from ed_models.families.kimi_linear import KimiLinearDecoderLayer as KimiLinearDecoderLayer
from ed_models.families.kimi_linear import KimiLinearForCausalLM as KimiLinearForCausalLM
from ed_models.families.kimi_linear import KimiLinearModel as KimiLinearModel
from ed_models.families.kimi_k25 import KimiMerger as KimiMerger
from ed_models.families.kimi_k25 import KimiTower as KimiTower
from ed_models.families.kolibri1 import Kolibri1Config as Kolibri1Config
from ed_models.families.kolibri1 import Kolibri1DecoderLayer as Kolibri1DecoderLayer
from ed_models.families.kolibri1 import Kolibri1ForCausalLM as Kolibri1ForCausalLM
from ed_models.families.kolibri1 import Kolibri1Model as Kolibri1Model
from ed_esurge import LLM as LLM
from ed_models.protocol import LanguageModel as LanguageModel
from ed_models.families.nemotron_h import LatentExperts as LatentExperts
from ed_layers import LayerCacheSpec as LayerCacheSpec
from ed_models.families.lfm2 import Lfm2Config as Lfm2Config
from ed_models.families.lfm2 import Lfm2DecoderLayer as Lfm2DecoderLayer
from ed_models.families.lfm2 import Lfm2ForCausalLM as Lfm2ForCausalLM
from ed_models.families.lfm2 import Lfm2Model as Lfm2Model
from ed_models.families.lfm2_moe import Lfm2MoeConfig as Lfm2MoeConfig
from ed_models.families.lfm2_moe import Lfm2MoeDecoderLayer as Lfm2MoeDecoderLayer
from ed_models.families.lfm2_moe import Lfm2MoeForCausalLM as Lfm2MoeForCausalLM
from ed_models.families.lfm2_moe import Lfm2MoeModel as Lfm2MoeModel
from ed_models.families.lighton_ocr import LightOnOcrConfig as LightOnOcrConfig
from ed_models.families.lighton_ocr import LightOnOcrForConditionalGeneration as LightOnOcrForConditionalGeneration
from ed_models.families.lighton_ocr import LightOnOcrModel as LightOnOcrModel
from ed_layers import Linear as Linear
from ed_models.families.llama4 import Llama4Config as Llama4Config
from ed_models.families.llama4 import Llama4TextForCausalLM as _Llama4ForCausalLM
from ed_models.families.llama4 import Llama4ForConditionalGeneration as Llama4ForConditionalGeneration
from ed_models.families.llama4 import Llama4Model as Llama4Model
from ed_models.families.llama4 import Llama4Projector as Llama4Projector
from ed_models.families.llama4 import Llama4TextAttention as Llama4TextAttention
from ed_models.families.llama4 import Llama4TextConfig as Llama4TextConfig
from ed_models.families.llama4 import Llama4TextDecoderLayer as Llama4TextDecoderLayer
from ed_models.families.llama4 import Llama4TextForCausalLM as Llama4TextForCausalLM
from ed_models.families.llama4 import Llama4TextModel as Llama4TextModel
from ed_models.families.llama4 import Llama4VisionAdapter as Llama4VisionAdapter
from ed_models.families.llama4 import Llama4VisionConfig as Llama4VisionConfig
from ed_models.families.llama4 import Llama4VisionEmbeddings as Llama4VisionEmbeddings
from ed_models.families.llama4 import Llama4VisionLayer as Llama4VisionLayer
from ed_models.families.llama4 import Llama4VisionModel as Llama4VisionModel
from ed_models.families.llama import LlamaConfig as LlamaConfig
from ed_models.families.llama import LlamaDecoderLayer as LlamaDecoderLayer
from ed_models.families.llama import LlamaForCausalLM as LlamaForCausalLM
from ed_models.families.llama import LlamaModel as LlamaModel
from ed_models.families.llava import LlavaConfig as LlavaConfig
from ed_models.families.llava import LlavaForConditionalGeneration as LlavaForConditionalGeneration
from ed_models.families.llava import LlavaModel as LlavaModel
from ed_models.families.llava_next import LlavaNextConfig as LlavaNextConfig
from ed_models.families.llava_next import LlavaNextForConditionalGeneration as LlavaNextForConditionalGeneration
from ed_models.families.llava_next import LlavaNextModel as LlavaNextModel
from ed_models.families.llava_next import LlavaNextVideoConfig as LlavaNextVideoConfig
from ed_models.families.llava_next import LlavaNextVideoForConditionalGeneration as LlavaNextVideoForConditionalGeneration
from ed_models.families.llava_next import LlavaNextVideoModel as LlavaNextVideoModel
from ed_models.families.llava_onevision import LlavaOnevisionConfig as LlavaOnevisionConfig
from ed_models.families.llava_onevision import LlavaOnevisionForConditionalGeneration as LlavaOnevisionForConditionalGeneration
from ed_models.families.llava_onevision import LlavaOnevisionModel as LlavaOnevisionModel
from ed_esurge import LoRARequest as LoRARequest
from ed_data import Loader as Loader
from ed_trainers import LogWatcher as LogWatcher
from ed_esurge import LoggedRequest as LoggedRequest
from ed_esurge import Logprob as Logprob
from ed_models.families.longt5 import LongT5Config as LongT5Config
from ed_models.families.longt5 import LongT5ForConditionalGeneration as LongT5ForConditionalGeneration
from ed_models.families.longt5 import LongT5Model as LongT5Model
from ed_models.families.longcat_flash import LongcatFlashConfig as LongcatFlashConfig
from ed_models.families.longcat_flash import LongcatFlashDecoderLayer as LongcatFlashDecoderLayer
from ed_models.families.longcat_flash import LongcatFlashExperts as LongcatFlashExperts
from ed_models.families.longcat_flash import LongcatFlashForCausalLM as LongcatFlashForCausalLM
from ed_models.families.longcat_flash import LongcatFlashModel as LongcatFlashModel
from ed_infra import LoraSpec as LoraSpec
from ed_trainers import Loss as Loss
from ed_elarge.building.easydel_training import LossConfig as LossConfig
from ed_models.families.m2m_100 import M2M100Config as M2M100Config
from ed_models.families.m2m_100 import M2M100ForConditionalGeneration as M2M100ForConditionalGeneration
from ed_models.families.m2m_100 import M2M100Model as M2M100Model
from ed_models.families.mbart import MBartConfig as MBartConfig
from ed_models.families.mbart import MBartForConditionalGeneration as MBartForConditionalGeneration
from ed_models.families.mbart import MBartModel as MBartModel
from ed_layers import MECHANISMS as MECHANISMS
from ed_trainers.options.supervised import MLMArguments as MLMArguments
from ed_trainers.options.supervised import MLMArguments as _MLMConfig
from ed_trainers.methods.mlm import MLMTrainer as MLMTrainer
from ed_models.families.mpnet import MPNetConfig as MPNetConfig
from ed_models.families.mpnet import MPNetForMaskedLM as MPNetForMaskedLM
from ed_models.families.mpnet import MPNetModel as MPNetModel
from ed_models.families.mt5 import MT5Config as MT5Config
from ed_models.families.mt5 import MT5ForConditionalGeneration as MT5ForConditionalGeneration
from ed_models.families.mt5 import MT5Model as MT5Model
from ed_models.families.mamba2 import Mamba2Block as Mamba2Block
from ed_models.families.mamba2 import Mamba2Config as Mamba2Config
from ed_models.families.mamba2 import Mamba2ForCausalLM as Mamba2ForCausalLM
from ed_models.families.mamba2 import Mamba2Model as Mamba2Model
from ed_models.families.mamba import MambaBlock as MambaBlock
from ed_models.families.mamba import MambaConfig as MambaConfig
from ed_models.families.mamba import MambaForCausalLM as MambaForCausalLM
from ed_models.families.mamba import MambaModel as MambaModel
from ed_models.families.marian import MarianConfig as MarianConfig
from ed_models.families.marian import MarianMTModel as MarianMTModel
from ed_models.families.marian import MarianModel as MarianModel
from ed_infra import MaskInfo as MaskInfo
from ed_layers import Mechanism as Mechanism
from ed_data import Media as Media
from ed_infra import MeshError as MeshError
from ed_trainers import Method as Method
from ed_trainers import MethodEntry as MethodEntry
from ed_trainers import MethodRun as MethodRun
from ed_infra import Metric as Metric
from ed_models.families.minicpm3 import MiniCPM3Config as MiniCPM3Config
from ed_models.families.minicpm3 import MiniCPM3DecoderLayer as MiniCPM3DecoderLayer
from ed_models.families.minicpm3 import MiniCPM3ForCausalLM as MiniCPM3ForCausalLM
from ed_models.families.minicpm3 import MiniCPM3Model as MiniCPM3Model
from ed_models.families.minimax import MiniMaxConfig as MiniMaxConfig
from ed_models.families.minimax import MiniMaxDecoderLayer as MiniMaxDecoderLayer
from ed_models.families.minimax import MiniMaxForCausalLM as MiniMaxForCausalLM
from ed_models.families.minimax_m2 import MiniMaxM2Config as MiniMaxM2Config
from ed_models.families.minimax_m2 import MiniMaxM2DecoderLayer as MiniMaxM2DecoderLayer
from ed_models.families.minimax_m2 import MiniMaxM2ForCausalLM as MiniMaxM2ForCausalLM
from ed_models.families.minimax_m2 import MiniMaxM2Model as MiniMaxM2Model
from ed_models.families.minimax import MiniMaxModel as MiniMaxModel
from ed_models.families.ministral3 import Ministral3Attention as Ministral3Attention
from ed_models.families.ministral3 import Ministral3Config as Ministral3Config
from ed_models.families.ministral3 import Ministral3DecoderLayer as Ministral3DecoderLayer
from ed_models.families.ministral3 import Ministral3ForCausalLM as Ministral3ForCausalLM
from ed_models.families.ministral3 import Ministral3Model as Ministral3Model
from ed_models.families.ministral import MinistralConfig as MinistralConfig
from ed_models.families.ministral import MinistralDecoderLayer as MinistralDecoderLayer
from ed_models.families.ministral import MinistralForCausalLM as MinistralForCausalLM
from ed_models.families.ministral import MinistralModel as MinistralModel
from ed_models.families.mistral3 import Mistral3Config as Mistral3Config
from ed_models.families.mistral3 import Mistral3ForConditionalGeneration as Mistral3ForConditionalGeneration
from ed_models.families.mistral3 import Mistral3Model as Mistral3Model
from ed_models.families.mistral3 import Mistral3Projector as Mistral3Projector
from ed_elarge.building.easydel_objects import Mistral3Tokenizer as Mistral3Tokenizer
from ed_models.families.mistral import MistralConfig as MistralConfig
from ed_models.families.mistral import MistralDecoderLayer as MistralDecoderLayer
from ed_models.families.mistral import MistralForCausalLM as MistralForCausalLM
from ed_models.families.mistral import MistralModel as MistralModel
from ed_models.families.mixtral import MixtralConfig as MixtralConfig
from ed_models.families.mixtral import MixtralDecoderLayer as MixtralDecoderLayer
from ed_models.families.mixtral import MixtralForCausalLM as MixtralForCausalLM
from ed_models.families.mixtral import MixtralModel as MixtralModel
from ed_data import Mixture as Mixture
from ed_infra.enums import MoEMethods as MoEMethods
from ed_elarge.building.easydel_objects import ModelConverter as ModelConverter
from ed_trainers import Models as Models
from ed_models.families.modernbert import ModernBertConfig as ModernBertConfig
from ed_models.families.modernbert import ModernBertForMaskedLM as ModernBertForMaskedLM
from ed_models.families.modernbert import ModernBertLayer as ModernBertLayer
from ed_models.families.modernbert import ModernBertModel as ModernBertModel
from ed_infra import ModuleCaches as ModuleCaches
from ed_models.families.moonshine import MoonshineConfig as MoonshineConfig
from ed_models.families.moonshine import MoonshineForConditionalGeneration as MoonshineForConditionalGeneration
from ed_models.families.moonshine import MoonshineFrontEnd as MoonshineFrontEnd
from ed_models.families.moonshine import MoonshineModel as MoonshineModel
from transformers.models.mpt.configuration_mpt import MptAttentionConfig as MptAttentionConfig
from ed_models.families.mpt import MptConfig as MptConfig
from ed_models.families.mpt import MptDecoderLayer as MptDecoderLayer
from ed_models.families.mpt import MptForCausalLM as MptForCausalLM
from ed_models.families.mpt import MptModel as MptModel
from ed_trainers.options.supervised import MultipleChoiceArguments as MultipleChoiceArguments
from ed_trainers.options.supervised import MultipleChoiceArguments as _MultipleChoiceConfig
from ed_trainers.methods.multiple_choice import MultipleChoiceTrainer as MultipleChoiceTrainer
from ed_infra import NOT_GIVEN as NOT_GIVEN
from ed_models.families.nanochat import NanoChatAttention as NanoChatAttention
from ed_models.families.nanochat import NanoChatConfig as NanoChatConfig
from ed_models.families.nanochat import NanoChatDecoderLayer as NanoChatDecoderLayer
from ed_models.families.nanochat import NanoChatForCausalLM as NanoChatForCausalLM
from ed_models.families.nanochat import NanoChatModel as NanoChatModel
from ed_trainers.options.online import NashMDArguments as NashMDArguments
from ed_trainers.options.online import NashMDArguments as _NashMDConfig
from ed_trainers.methods.nash_md import NashMDTrainer as NashMDTrainer
from ed_models.families.nemotron import NemotronConfig as NemotronConfig
from ed_models.families.nemotron import NemotronDecoderLayer as NemotronDecoderLayer
from ed_models.families.nemotron import NemotronForCausalLM as NemotronForCausalLM
from ed_models.families.nemotron_h import NemotronHBlock as NemotronHBlock
from ed_models.families.nemotron_h import NemotronHConfig as NemotronHConfig
from ed_models.families.nemotron_h import NemotronHForCausalLM as NemotronHForCausalLM
from ed_models.families.nemotron_h import NemotronHModel as NemotronHModel
from ed_models.families.nemotron import NemotronModel as NemotronModel
from ed_models.families.nomic_bert import NomicBertConfig as NomicBertConfig
from ed_models.families.nomic_bert import NomicBertForMaskedLM as NomicBertForMaskedLM
from ed_models.families.nomic_bert import NomicBertModel as NomicBertModel
from ed_models.families.opt import OPTConfig as OPTConfig
from ed_models.families.opt import OPTDecoderLayer as OPTDecoderLayer
from ed_models.families.opt import OPTForCausalLM as OPTForCausalLM
from ed_models.families.opt import OPTModel as OPTModel
from ed_trainers.options.preference import ORPOArguments as ORPOArguments
from ed_trainers.options.preference import ORPOArguments as _ORPOConfig
from ed_elarge.building.row_transforms import ORPOPreprocessTransform as ORPOPreprocessTransform
from ed_trainers.methods.orpo import ORPOTrainer as ORPOTrainer
from ed_models.families.olmo2 import Olmo2Config as Olmo2Config
from ed_models.families.olmo2 import Olmo2DecoderLayer as Olmo2DecoderLayer
from ed_models.families.olmo2 import Olmo2ForCausalLM as Olmo2ForCausalLM
from ed_models.families.olmo2 import Olmo2Model as Olmo2Model
from ed_models.families.olmo3 import Olmo3Config as Olmo3Config
from ed_models.families.olmo3 import Olmo3DecoderLayer as Olmo3DecoderLayer
from ed_models.families.olmo3 import Olmo3ForCausalLM as Olmo3ForCausalLM
from ed_models.families.olmo3 import Olmo3Model as Olmo3Model
from ed_models.families.olmo import OlmoConfig as OlmoConfig
from ed_models.families.olmo import OlmoDecoderLayer as OlmoDecoderLayer
from ed_models.families.olmo import OlmoForCausalLM as OlmoForCausalLM
from ed_models.families.olmo_hybrid import OlmoHybridConfig as OlmoHybridConfig
from ed_models.families.olmo_hybrid import OlmoHybridForCausalLM as OlmoHybridForCausalLM
from ed_models.families.olmo_hybrid import OlmoHybridModel as OlmoHybridModel
from ed_models.families.olmo import OlmoModel as OlmoModel
from ed_models.families.olmoe import OlmoeConfig as OlmoeConfig
from ed_models.families.olmoe import OlmoeDecoderLayer as OlmoeDecoderLayer
from ed_models.families.olmoe import OlmoeForCausalLM as OlmoeForCausalLM
from ed_models.families.olmoe import OlmoeModel as OlmoeModel
from ed_trainers.options.distillation import OnPolicyDistillationArguments as OnPolicyDistillationArguments
from ed_trainers.options.distillation import OnPolicyDistillationArguments as _OnPolicyDistillationConfig
from ed_trainers.methods.gkd import OnPolicyDistillationTrainer as OnPolicyDistillationTrainer
from ed_models.families.openelm import OpenELMConfig as OpenELMConfig
from ed_models.families.openelm import OpenELMDecoderLayer as OpenELMDecoderLayer
from ed_models.families.openelm import OpenELMForCausalLM as OpenELMForCausalLM
from ed_models.families.openelm import OpenELMModel as OpenELMModel
from ed_layers.attention.kernel import Kernel as _OperationImpl
from ed_layers.attention.kernel import Settings as _OperationMetadata
from ed_layers.attention.kernels import kernels as _OperationRegistry
from ed_infra import Options as Options
from ed_infra import PARAM_AXES as PARAM_AXES
from ed_trainers.options.online import PPOArguments as PPOArguments
from ed_trainers.options.online import PPOArguments as _PPOConfig
from ed_elarge.building.row_transforms import PPOPreprocessTransform as PPOPreprocessTransform
from ed_trainers.methods.ppo import PPOTrainer as PPOTrainer
from ed_trainers.options.preference import PRMArguments as PRMArguments
from ed_trainers.options.preference import PRMArguments as _PRMConfig
from ed_trainers.methods.prm import PRMTrainer as PRMTrainer
from ed_data import Packing as Packing
from ed_layers import PagedCache as PagedCache
from ed_models.families.paligemma import PaliGemmaConfig as PaliGemmaConfig
from ed_models.families.paligemma import PaliGemmaForConditionalGeneration as PaliGemmaForConditionalGeneration
from ed_models.families.paligemma import PaliGemmaModel as PaliGemmaModel
from ed_models.families.paligemma import PaliGemmaProjector as PaliGemmaProjector
from ed_infra import PartitionAxis as PartitionAxis
from ed_infra import PartitionManager as PartitionManager
from ed_models.families.pegasus import PegasusConfig as PegasusConfig
from ed_models.families.pegasus import PegasusForConditionalGeneration as PegasusForConditionalGeneration
from ed_models.families.pegasus import PegasusModel as PegasusModel
from ed_models.families.persimmon import PersimmonConfig as PersimmonConfig
from ed_models.families.persimmon import PersimmonDecoderLayer as PersimmonDecoderLayer
from ed_models.families.persimmon import PersimmonForCausalLM as PersimmonForCausalLM
from ed_models.families.persimmon import PersimmonModel as PersimmonModel
from ed_models.families.phi3 import Phi3Config as Phi3Config
from ed_models.families.phi3 import Phi3DecoderLayer as Phi3DecoderLayer
from ed_models.families.phi3 import Phi3ForCausalLM as Phi3ForCausalLM
from ed_models.families.phi3 import Phi3Model as Phi3Model
from ed_models.families.phi import PhiConfig as PhiConfig
from ed_models.families.phi import PhiDecoderLayer as PhiDecoderLayer
from ed_models.families.phi import PhiForCausalLM as PhiForCausalLM
from ed_models.families.phi import PhiModel as PhiModel
from ed_models.families.phimoe import PhimoeConfig as _PhiMoeConfig
from ed_models.families.phimoe import PhimoeForCausalLM as _PhiMoeForCausalLM
from ed_models.families.phimoe import PhimoeModel as _PhiMoeModel
from ed_models.families.phimoe import PhimoeConfig as PhimoeConfig
from ed_models.families.phimoe import PhimoeDecoderLayer as PhimoeDecoderLayer
from ed_models.families.phimoe import PhimoeForCausalLM as PhimoeForCausalLM
from ed_models.families.phimoe import PhimoeModel as PhimoeModel
from ed_models.families.phimoe import PhimoeRouter as PhimoeRouter
from ed_models.families.pixtral import PixtralVisionConfig as PixtralVisionConfig
from ed_models.families.pixtral import PixtralVisionModel as PixtralVisionModel
from ed_esurge import PoolingParams as PoolingParams
from ed_data import PromptLoader as PromptLoader
from flax.struct import PyTreeNode as _PyTree
from ed_layers import QArray as QArray
from ed_infra.enums import QuantizationType as QuantizationType
from ed_trainers.options.supervised import QuestionAnsweringArguments as QuestionAnsweringArguments
from ed_trainers.options.supervised import QuestionAnsweringArguments as _QuestionAnsweringConfig
from ed_trainers.methods.question_answering import QuestionAnsweringTrainer as QuestionAnsweringTrainer
from ed_models.families.qwen2_audio import Qwen2AudioConfig as Qwen2AudioConfig
from ed_models.families.qwen2_audio import Qwen2AudioEncoderConfig as Qwen2AudioEncoderConfig
from ed_models.families.qwen2_audio import Qwen2AudioForConditionalGeneration as Qwen2AudioForConditionalGeneration
from ed_models.families.qwen2_audio import Qwen2AudioModel as Qwen2AudioModel
from ed_models.families.qwen2_audio import Qwen2AudioProjector as Qwen2AudioProjector
from ed_models.families.qwen2 import Qwen2Config as Qwen2Config
from ed_models.families.qwen2 import Qwen2DecoderLayer as Qwen2DecoderLayer
from ed_models.families.qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from ed_models.families.qwen2 import Qwen2Model as Qwen2Model
from ed_models.families.qwen2_moe import Qwen2MoeConfig as Qwen2MoeConfig
from ed_models.families.qwen2_moe import Qwen2MoeDecoderLayer as Qwen2MoeDecoderLayer
from ed_models.families.qwen2_moe import Qwen2MoeForCausalLM as Qwen2MoeForCausalLM
from ed_models.families.qwen2_moe import Qwen2MoeModel as Qwen2MoeModel
from ed_models.families.qwen2_vl import Qwen2VLConfig as Qwen2VLConfig
from ed_models.families.qwen2_vl import Qwen2VLForConditionalGeneration as Qwen2VLForConditionalGeneration
from ed_models.families.qwen2_vl import Qwen2VLModel as Qwen2VLModel
from ed_models.families.qwen2_vl import Qwen2VLTextConfig as Qwen2VLTextConfig
from ed_models.families.qwen2_vl import Qwen2VLTextDecoderLayer as Qwen2VLTextDecoderLayer
from ed_models.families.qwen2_vl import Qwen2VLTextForCausalLM as Qwen2VLTextForCausalLM
from ed_models.families.qwen2_vl import Qwen2VLTextModel as Qwen2VLTextModel
from ed_models.families.qwen2_vl import Qwen2VLVisionBlock as Qwen2VLVisionBlock
from ed_models.families.qwen2_vl import Qwen2VLVisionConfig as Qwen2VLVisionConfig
from ed_models.families.qwen2_5_vl import Qwen2_5_VLConfig as Qwen2_5_VLConfig
from ed_models.families.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Qwen2_5_VLForConditionalGeneration
from ed_models.families.qwen2_5_vl import Qwen2_5_VLModel as Qwen2_5_VLModel
from ed_models.families.qwen2_5_vl import Qwen2_5_VLTextConfig as Qwen2_5_VLTextConfig
from ed_models.families.qwen2_5_vl import Qwen2_5_VLTextDecoderLayer as Qwen2_5_VLTextDecoderLayer
from ed_models.families.qwen2_5_vl import Qwen2_5_VLTextForCausalLM as Qwen2_5_VLTextForCausalLM
from ed_models.families.qwen2_5_vl import Qwen2_5_VLTextModel as Qwen2_5_VLTextModel
from ed_models.families.qwen2_5_vl import Qwen2_5_VLVisionConfig as Qwen2_5_VLVisionConfig
from ed_models.families.qwen3 import Qwen3Config as Qwen3Config
from ed_models.families.qwen3 import Qwen3DecoderLayer as Qwen3DecoderLayer
from ed_models.families.qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from ed_models.families.qwen3 import Qwen3Model as Qwen3Model
from ed_models.families.qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from ed_models.families.qwen3_moe import Qwen3MoeDecoderLayer as Qwen3MoeDecoderLayer
from ed_models.families.qwen3_moe import Qwen3MoeForCausalLM as Qwen3MoeForCausalLM
from ed_models.families.qwen3_moe import Qwen3MoeModel as Qwen3MoeModel
from ed_models.families.qwen3_next import Qwen3NextConfig as Qwen3NextConfig
from ed_models.families.qwen3_next import Qwen3NextDecoderLayer as Qwen3NextDecoderLayer
from ed_models.families.qwen3_next import Qwen3NextForCausalLM as Qwen3NextForCausalLM
from ed_models.families.qwen3_next import Qwen3NextModel as Qwen3NextModel
from ed_models.families.qwen3_vl import Qwen3VLConfig as Qwen3VLConfig
from ed_models.families.qwen3_vl import Qwen3VLForConditionalGeneration as Qwen3VLForConditionalGeneration
from ed_models.families.qwen3_vl import Qwen3VLModel as Qwen3VLModel
from ed_models.families.qwen3_vl_moe import Qwen3VLMoeConfig as Qwen3VLMoeConfig
from ed_models.families.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration as Qwen3VLMoeForConditionalGeneration
from ed_models.families.qwen3_vl_moe import Qwen3VLMoeModel as Qwen3VLMoeModel
from ed_models.families.qwen3_vl_moe import Qwen3VLMoeTextConfig as Qwen3VLMoeTextConfig
from ed_models.families.qwen3_vl_moe import Qwen3VLMoeTextDecoderLayer as Qwen3VLMoeTextDecoderLayer
from ed_models.families.qwen3_vl_moe import Qwen3VLMoeTextForCausalLM as Qwen3VLMoeTextForCausalLM
from ed_models.families.qwen3_vl_moe import Qwen3VLMoeTextModel as Qwen3VLMoeTextModel
from ed_models.families.qwen3_vl_moe import Qwen3VLMoeVisionConfig as Qwen3VLMoeVisionConfig
from ed_models.body.patch_tower import PatchTower as _Qwen3VLMoeVisionTransformerPretrainedModel
from ed_models.families.qwen3_vl import Qwen3VLTextConfig as Qwen3VLTextConfig
from ed_models.families.qwen3_vl import Qwen3VLTextDecoderLayer as Qwen3VLTextDecoderLayer
from ed_models.families.qwen3_vl import Qwen3VLTextForCausalLM as Qwen3VLTextForCausalLM
from ed_models.families.qwen3_vl import Qwen3VLTextModel as Qwen3VLTextModel
from ed_models.families.qwen3_vl import Qwen3VLVisionConfig as Qwen3VLVisionConfig
from ed_models.body.patch_tower import PatchTower as _Qwen3VisionTransformerPretrainedModel
from ed_models.families.qwen3_5_text import Qwen3_5Config as Qwen3_5Config
from ed_models.families.qwen3_5_text import Qwen3_5DecoderLayer as Qwen3_5DecoderLayer
from ed_models.families.qwen3_5_text import Qwen3_5ForCausalLM as Qwen3_5ForCausalLM
from ed_models.families.qwen3_5_text import Qwen3_5ForConditionalGeneration as Qwen3_5ForConditionalGeneration
from ed_models.families.qwen3_5_text import Qwen3_5Model as Qwen3_5Model
from ed_models.families.qwen3_5_moe_text import Qwen3_5MoeConfig as Qwen3_5MoeConfig
from ed_models.families.qwen3_5_moe_text import Qwen3_5MoeDecoderLayer as Qwen3_5MoeDecoderLayer
from ed_models.families.qwen3_5_moe_text import Qwen3_5MoeForCausalLM as Qwen3_5MoeForCausalLM
from ed_models.families.qwen3_5_moe_text import Qwen3_5MoeForConditionalGeneration as Qwen3_5MoeForConditionalGeneration
from ed_models.families.qwen3_5_moe_text import Qwen3_5MoeModel as Qwen3_5MoeModel
from ed_models.families.qwen3_5_moe_text import Qwen3_5MoeTextConfig as Qwen3_5MoeTextConfig
from ed_models.families.qwen3_5_moe_text import Qwen3_5MoeTextModel as Qwen3_5MoeTextModel
from ed_models.families.qwen3_5_moe_text import Qwen3_5MoeVisionConfig as Qwen3_5MoeVisionConfig
from ed_models.families.qwen3_5_text import Qwen3_5TextConfig as Qwen3_5TextConfig
from ed_models.families.qwen3_5_text import Qwen3_5TextModel as Qwen3_5TextModel
from ed_models.families.qwen3_5_text import Qwen3_5VisionConfig as Qwen3_5VisionConfig
from ed_trainers.options.groups import RLOOArguments as RLOOArguments
from ed_trainers.options.groups import RLOOArguments as _RLOOConfig
from ed_trainers.methods.rloo import RLOOTrainer as RLOOTrainer
from ed_trainers.options.groups import RLVRArguments as RLVRArguments
from ed_trainers.options.groups import RLVRArguments as _RLVRConfig
from ed_trainers.methods.grpo import RLVRTrainer as RLVRTrainer
from ed_layers import RMSNorm as RMSNorm
from ed_layers import RaggedBatch as RaggedBatch
from ed_infra.specs import BaseOperationConfig as _RaggedPageAttentionv2Config
from ed_infra.specs import BaseOperationConfig as _RaggedPageAttentionv3Config
from ed_elarge.building.easydel_training import RayDistributedTrainer as RayDistributedTrainer
from ed_layers import RecurrentCache as RecurrentCache
from ed_models.families.recurrent_gemma import RecurrentGemmaConfig as RecurrentGemmaConfig
from ed_models.families.recurrent_gemma import RecurrentGemmaDecoderLayer as RecurrentGemmaDecoderLayer
from ed_models.families.recurrent_gemma import RecurrentGemmaForCausalLM as RecurrentGemmaForCausalLM
from ed_models.families.recurrent_gemma import RecurrentGemmaModel as RecurrentGemmaModel
from ed_layers import RecurrentSpec as RecurrentSpec
from ed_elarge.building.easydel_objects import Registry as Registry
from ed_infra import RegistryError as RegistryError
from ed_data import Report as Report
from ed_esurge import RequestMetrics as RequestMetrics
from ed_esurge.outputs import RequestOutput as RequestOutput
from ed_trainers.options.preference import RewardArguments as RewardArguments
from ed_trainers.options.preference import RewardArguments as _RewardConfig
from ed_elarge.building.row_transforms import RewardPreprocessTransform as RewardPreprocessTransform
from ed_trainers.methods.reward import RewardTrainer as RewardTrainer
from ed_infra.specs import BaseOperationConfig as _RingAttentionConfig
from flax.nnx import Rngs as Rngs
from ed_models.families.roberta import RobertaConfig as RobertaConfig
from ed_models.families.roberta import RobertaForMaskedLM as RobertaForMaskedLM
from ed_models.families.roberta import RobertaModel as RobertaModel
from ed_trainers import Role as Role
from ed_trainers import Rollout as Rollout
from ed_infra import Rules as Rules
from ed_models.families.rwkv import RwkvBlock as RwkvBlock
from ed_models.families.rwkv import RwkvConfig as RwkvConfig
from ed_models.families.rwkv import RwkvForCausalLM as RwkvForCausalLM
from ed_models.families.rwkv import RwkvModel as RwkvModel
from ed_trainers.options.distillation import SDFTArguments as SDFTArguments
from ed_trainers.options.distillation import SDFTArguments as _SDFTConfig
from ed_trainers.methods.sdft import SDFTTrainer as SDFTTrainer
from ed_trainers.options.groups import SDPOArguments as SDPOArguments
from ed_trainers.options.groups import SDPOArguments as _SDPOConfig
from ed_trainers.methods.sdpo import SDPOTrainer as SDPOTrainer
from ed_trainers import SFTArguments as SFTArguments
from ed_trainers.options.supervised import SFTArguments as _SFTConfig
from ed_elarge.building.row_transforms import SFTPreprocessTransform as SFTPreprocessTransform
from ed_trainers import SFTTrainer as SFTTrainer
from ed_trainers import Sampled as Sampled
from ed_esurge import SamplingParams as SamplingParams
from ed_data import Saving as Saving
from ed_infra.specs import BaseOperationConfig as _ScaledDotProductAttentionConfig
from ed_data import Schema as Schema
from ed_models.families.seed_oss import SeedOssConfig as SeedOssConfig
from ed_models.families.seed_oss import SeedOssDecoderLayer as SeedOssDecoderLayer
from ed_models.families.seed_oss import SeedOssForCausalLM as SeedOssForCausalLM
from ed_models.families.seed_oss import SeedOssModel as SeedOssModel
from ed_trainers.options.distillation import SeqKDArguments as SeqKDArguments
from ed_trainers.options.distillation import SeqKDArguments as _SeqKDConfig
from ed_trainers.methods.seq_kd import SeqKDTrainer as SeqKDTrainer
from ed_trainers.options.supervised import SequenceClassificationArguments as SequenceClassificationArguments
from ed_trainers.options.supervised import SequenceClassificationArguments as _SequenceClassificationConfig
from ed_trainers.methods.sequence_classification import SequenceClassificationTrainer as SequenceClassificationTrainer
from ed_infra import SequenceClassifierOutput as SequenceClassifierOutput
from ed_models.families.siglip2 import Siglip2Config as Siglip2Config
from ed_models.families.siglip2 import Siglip2Embeddings as Siglip2Embeddings
from ed_models.families.siglip2 import Siglip2ForImageClassification as Siglip2ForImageClassification
from ed_models.families.siglip2 import Siglip2Model as Siglip2Model
from ed_models.families.siglip2 import Siglip2TextConfig as Siglip2TextConfig
from ed_models.families.siglip2 import Siglip2TextModel as Siglip2TextModel
from ed_models.families.siglip2 import Siglip2VisionConfig as Siglip2VisionConfig
from ed_models.families.siglip2 import Siglip2VisionModel as Siglip2VisionModel
from ed_models.families.siglip import SiglipConfig as SiglipConfig
from ed_models.families.siglip import SiglipForImageClassification as SiglipForImageClassification
from ed_models.families.siglip import SiglipModel as SiglipModel
from ed_models.families.siglip import SiglipTextConfig as SiglipTextConfig
from ed_models.families.siglip import SiglipTextModel as SiglipTextModel
from ed_models.families.siglip import SiglipVisionConfig as SiglipVisionConfig
from ed_models.families.siglip import SiglipVisionModel as SiglipVisionModel
from ed_trainers.options.preference import SimPOArguments as SimPOArguments
from ed_trainers.options.preference import SimPOArguments as _SimPOConfig
from ed_trainers.methods.cpo import SimPOTrainer as SimPOTrainer
from ed_models.families.smollm3 import SmolLM3Config as SmolLM3Config
from ed_models.families.smollm3 import SmolLM3DecoderLayer as SmolLM3DecoderLayer
from ed_models.families.smollm3 import SmolLM3ForCausalLM as SmolLM3ForCausalLM
from ed_models.families.smollm3 import SmolLM3Model as SmolLM3Model
from ed_models.families.idefics3 import SmolVLMConfig as SmolVLMConfig
from ed_models.families.idefics3 import SmolVLMForConditionalGeneration as SmolVLMForConditionalGeneration
from ed_models.families.idefics3 import SmolVLMModel as SmolVLMModel
from ed_models.families.idefics3 import SmolVLMVisionConfig as SmolVLMVisionConfig
from ed_trainers.options.supervised import SpanCorruptionArguments as SpanCorruptionArguments
from ed_trainers.options.supervised import SpanCorruptionArguments as _SpanCorruptionConfig
from ed_trainers.methods.span_corruption import SpanCorruptionTrainer as SpanCorruptionTrainer
from ed_trainers.options.distillation import SparseDistillationArguments as SparseDistillationArguments
from ed_trainers.options.distillation import SparseDistillationArguments as _SparseDistillationConfig
from ed_trainers.methods.gkd import SparseDistillationTrainer as SparseDistillationTrainer
from ed_models.families.stablelm import StableLmConfig as StableLmConfig
from ed_models.families.stablelm import StableLmForCausalLM as StableLmForCausalLM
from ed_models.families.stablelm import StableLmModel as StableLmModel
from ed_layers import Stack as Stack
from ed_models.families.starcoder2 import Starcoder2Config as Starcoder2Config
from ed_models.families.starcoder2 import Starcoder2DecoderLayer as Starcoder2DecoderLayer
from ed_models.families.starcoder2 import Starcoder2ForCausalLM as Starcoder2ForCausalLM
from ed_models.families.starcoder2 import Starcoder2Model as Starcoder2Model
from ed_elarge.building.easydel_objects import StateDictConverter as StateDictConverter
from ed_layers import StateSpec as StateSpec
from ed_models.families.kimi_linear import StillLatentAttention as StillLatentAttention
from ed_data import StreamLoader as StreamLoader
from ed_esurge import StructuredOutputs as StructuredOutputs
from ed_esurge import StructuredOutputsParams as StructuredOutputsParams
from ed_models.families.t5 import T5Config as T5Config
from ed_models.families.t5 import T5ForConditionalGeneration as T5ForConditionalGeneration
from ed_models.families.t5gemma import T5GemmaConfig as T5GemmaConfig
from ed_models.families.t5gemma import T5GemmaForConditionalGeneration as T5GemmaForConditionalGeneration
from ed_models.families.t5gemma import T5GemmaModel as T5GemmaModel
from ed_models.families.t5gemma import T5GemmaSideConfig as T5GemmaSideConfig
from ed_models.families.t5 import T5Model as T5Model
from ed_trainers.options.preference import TPOArguments as TPOArguments
from ed_trainers.options.preference import TPOArguments as _TPOConfig
from ed_trainers.methods.tpo import TPOTrainer as TPOTrainer
from ed_infra import TaskType as TaskType
from ed_data import Inform as _TextDatasetInform
from ed_models import TokenChoice as TokenChoice
from ed_trainers.options.supervised import TokenClassificationArguments as TokenClassificationArguments
from ed_trainers.options.supervised import TokenClassificationArguments as _TokenClassificationConfig
from ed_trainers.methods.token_classification import TokenClassificationTrainer as TokenClassificationTrainer
from ed_data import Tokenization as Tokenization
from ed_esurge.replies.parser import ReplyParser as _ToolParser
from ed_esurge.replies.tool_formats import TOOL_FORMATS as _ToolParserManager
from ed_trainers import Trainer as Trainer
from ed_trainers import TrainerOutput as TrainerOutput
from ed_trainers import TrainingArguments as TrainingArguments
from ed_trainers import TrainingDiverged as TrainingDiverged
from ed_models.families.umt5 import UMT5Attention as UMT5Attention
from ed_models.families.umt5 import UMT5Config as UMT5Config
from ed_models.families.umt5 import UMT5ForConditionalGeneration as UMT5ForConditionalGeneration
from ed_models.families.umt5 import UMT5Model as UMT5Model
from ed_data import Value as Value
from ed_models.families.vaultgemma import VaultGemmaConfig as VaultGemmaConfig
from ed_models.families.vaultgemma import VaultGemmaDecoderLayer as VaultGemmaDecoderLayer
from ed_models.families.vaultgemma import VaultGemmaForCausalLM as VaultGemmaForCausalLM
from ed_models.families.vaultgemma import VaultGemmaModel as VaultGemmaModel
from ed_models.families.vit import ViTConfig as ViTConfig
from ed_models.families.vit import ViTForImageClassification as ViTForImageClassification
from ed_models.families.vit import ViTModel as ViTModel
from ed_models.families.vipllava import VipLlavaConfig as VipLlavaConfig
from ed_models.families.vipllava import VipLlavaForConditionalGeneration as VipLlavaForConditionalGeneration
from ed_models.families.vipllava import VipLlavaModel as VipLlavaModel
from ed_models.families.vipllava import VipLlavaProjector as VipLlavaProjector
from ed_data import Inform as _VisualDatasetInform
from ed_models.families.voxtral import VoxtralConfig as VoxtralConfig
from ed_models.families.voxtral import VoxtralEncoderConfig as VoxtralEncoderConfig
from ed_models.families.voxtral import VoxtralForConditionalGeneration as VoxtralForConditionalGeneration
from ed_models.families.voxtral import VoxtralModel as VoxtralModel
from ed_models.families.voxtral import VoxtralProjector as VoxtralProjector
from ed_models.families.wav2vec2 import Wav2Vec2Config as Wav2Vec2Config
from ed_models.families.wav2vec2 import Wav2Vec2ForCTC as Wav2Vec2ForCTC
from ed_models.families.wav2vec2 import Wav2Vec2ForSequenceClassification as Wav2Vec2ForSequenceClassification
from ed_models.families.wav2vec2 import Wav2Vec2Model as Wav2Vec2Model
from ed_trainers import Weights as Weights
from ed_models.families.whisper import WhisperConfig as WhisperConfig
from ed_models.families.whisper import WhisperForConditionalGeneration as WhisperForConditionalGeneration
from ed_models.families.whisper import WhisperModel as WhisperModel
from ed_models.generation.timestamps import TimestampRules as _WhisperTimeStampLogitsProcessor
from ed_layers import WindowCache as WindowCache
from ed_models.families.apertus import XIELU as XIELU
from ed_models.families.xlm_roberta import XLMRobertaConfig as XLMRobertaConfig
from ed_models.families.xlm_roberta import XLMRobertaForMaskedLM as XLMRobertaForMaskedLM
from ed_models.families.xlm_roberta import XLMRobertaModel as XLMRobertaModel
from ed_trainers.options.online import XPOArguments as XPOArguments
from ed_trainers.options.online import XPOArguments as _XPOConfig
from ed_trainers.methods.xpo import XPOTrainer as XPOTrainer
from ed_models.families.youtu import YoutuConfig as YoutuConfig
from ed_models.families.youtu import YoutuDecoderLayer as YoutuDecoderLayer
from ed_models.families.youtu import YoutuForCausalLM as YoutuForCausalLM
from ed_models.families.youtu import YoutuModel as YoutuModel
from ed_layers import apply_rotary as apply_rotary
from ed_trainers import arguments_class as arguments_class
from ed_layers import attend as attend
from flax.struct import dataclass as _auto_pytree
from ed_data import build_loader as _build_dataset
from ed_data import build_loader as build_loader
from ed_data import build_prompts as build_prompts
from ed_infra import canonical_dtype as canonical_dtype
from ed_data import check_names as check_names
from ed_data import contents as contents
from ed_esurge import create_app as create_app
from ed_infra import create_mesh as create_mesh
from ed_trainers import create_optimizer as create_optimizer
from ed_layers import cross_entropy_sum as cross_entropy_sum
from ed_data import data_report as data_report
from ed_data import default_cache_dir as default_cache_dir
from ed_layers import dequantize as dequantize
from ed_data import documents as documents
from ed_elarge import eLargeModel as eLargeModel
from etils.epath import Path as _ePath
from etils.epath import PathLike as _ePathLike
from ed_esurge import eSurge as eSurge
from ed_esurge.server.launch import eSurgeApiServer as eSurgeApiServer
from ed_esurge import eSurgeLM as eSurgeLM
from ed_esurge.lm_eval import eSurgeLM as _eSurgeLMEvalAdapter
from ed_esurge.runner.model_runner import ModelRunner as _eSurgeRunner
from jax import jit as _ejit
from ed_infra import extract_commit_hash as extract_commit_hash
from ed_infra import get_config as get_config
from ed_infra import get_module as get_module
from ed_infra.registry import get_modules_by_type as get_modules_by_type
from ed_data import idle_options as idle_options
from ed_infra.distributed import initialize as _init_cluster
from ed_layers.dropout import is_dropout_disabled as _is_inference_mode
from ed_layers import is_quantized as is_quantized
from ed_data import pack as pack
from ed_elarge.building.easydel_objects import pack_sequences as pack_sequences
from ed_elarge.building import row_transforms as _prompt_transforms
from ed_layers import quantize as quantize
from ed_data import read_rows as read_rows
from ed_infra import register_config as register_config
from ed_infra import register_module as register_module
from ed_infra import registry as registry
from ed_data import remove_cache as remove_cache
from ed_layers import rope_tables as rope_tables
from ed_data import save_mixture as save_mixture
from ed_esurge import serve as serve
from ed_infra import set_attrs_smartly as set_attrs_smartly
from ed_layers.dropout import disable_dropout as _set_inference_mode
from ed_data import texts as texts
from ed_layers import to_layout as to_layout
from ed_layers import token_logprobs as token_logprobs
from ed_data import train_bpe as train_bpe
from ed_trainers import trainer_class as trainer_class
from ed_trainers import trainer_of as trainer_of
from flax import traverse_util as _traversals
from ed_elarge.building.easydel_speech import vWhisperInference as vWhisperInference
from ed_elarge.building.easydel_speech import vWhisperInferenceConfig as vWhisperInferenceConfig
from ed_data import without_tokens as without_tokens
from ed_layers.attention import Mechanism as _Mechanism
from ed_models.tasks.classification import SequenceClassifier as _ForSequenceClassification
from ed_models.tasks.embedding import Embedder as _ForEmbedding
from ed_models.tasks.encoders import TokenClassifier as _ForTokenClassification
from ed_models.tasks.encoders import QuestionAnswerer as _ForQuestionAnswering
from ed_models.tasks.encoders import MultipleChoice as _ForMultipleChoice
AfmoeForEmbedding = _ForEmbedding
AfmoeForSequenceClassification = _ForSequenceClassification
AlbertForEmbedding = _ForEmbedding
AlbertForMultipleChoice = _ForMultipleChoice
AlbertForQuestionAnswering = _ForQuestionAnswering
AlbertForSequenceClassification = _ForSequenceClassification
AlbertForTokenClassification = _ForTokenClassification
ApertusForEmbedding = _ForEmbedding
ApertusForSequenceClassification = _ForSequenceClassification
ArceeForEmbedding = _ForEmbedding
ArceeForSequenceClassification = _ForSequenceClassification
ArcticForEmbedding = _ForEmbedding
ArcticForSequenceClassification = _ForSequenceClassification
AttentionConfig = _AttentionConfig
AttentionModule = _AttentionModule
AutoRegressiveDecodeAttn: _Mechanism
AutoStateAnyToAnyModel = AutoState
AutoStateForAudioClassification = AutoState
AutoStateForCTC = AutoState
AutoStateForCausalLM = AutoState
AutoStateForEmbedding = AutoState
AutoStateForImageClassification = AutoState
AutoStateForImageSequenceClassification = AutoState
AutoStateForImageTextToText = AutoState
AutoStateForMaskedLM = AutoState
AutoStateForMultipleChoice = AutoState
AutoStateForQuestionAnswering = AutoState
AutoStateForReward = AutoState
AutoStateForSeq2SeqLM = AutoState
AutoStateForSequenceClassification = AutoState
AutoStateForSpeechSeq2Seq = AutoState
AutoStateForTokenClassification = AutoState
AutoStateForZeroShotImageClassification = AutoState
AutoStateVisionModel = AutoState
BCOConfig = _BCOConfig
BambaForEmbedding = _ForEmbedding
BambaForSequenceClassification = _ForSequenceClassification
BaseDatasetInform = _BaseDatasetInform
BaseModuleProtocol = _BaseModuleProtocol
BaseTrainer = _BaseTrainer
BertForEmbedding = _ForEmbedding
BertForMultipleChoice = _ForMultipleChoice
BertForQuestionAnswering = _ForQuestionAnswering
BertForSequenceClassification = _ForSequenceClassification
BertForTokenClassification = _ForTokenClassification
BioGptForEmbedding = _ForEmbedding
BioGptForSequenceClassification = _ForSequenceClassification
BlockSparseAttentionConfig = _BlockSparseAttentionConfig
BlockSparseAttn: _Mechanism
BloomForEmbedding = _ForEmbedding
BloomForSequenceClassification = _ForSequenceClassification
CPOConfig = _CPOConfig
CTCConfig = _CTCConfig
CodeGenForEmbedding = _ForEmbedding
CodeGenForSequenceClassification = _ForSequenceClassification
Cohere2ForEmbedding = _ForEmbedding
Cohere2ForSequenceClassification = _ForSequenceClassification
Cohere2MoeForEmbedding = _ForEmbedding
Cohere2MoeForSequenceClassification = _ForSequenceClassification
CohereForEmbedding = _ForEmbedding
CohereForSequenceClassification = _ForSequenceClassification
ContrastiveConfig = _ContrastiveConfig
CrossEncoderConfig = _CrossEncoderConfig
CwmForEmbedding = _ForEmbedding
CwmForSequenceClassification = _ForSequenceClassification
DPOConfig = _DPOConfig
DatasetLoadError = _DatasetLoadError
DatasetMixture = _DatasetMixture
DbrxForEmbedding = _ForEmbedding
DbrxForSequenceClassification = _ForSequenceClassification
DebertaV2ForEmbedding = _ForEmbedding
DebertaV2ForMultipleChoice = _ForMultipleChoice
DebertaV2ForQuestionAnswering = _ForQuestionAnswering
DebertaV2ForSequenceClassification = _ForSequenceClassification
DebertaV2ForTokenClassification = _ForTokenClassification
DeepseekV2ForEmbedding = _ForEmbedding
DeepseekV2ForSequenceClassification = _ForSequenceClassification
DeepseekV32ForEmbedding = _ForEmbedding
DeepseekV32ForSequenceClassification = _ForSequenceClassification
DeepseekV3ForEmbedding = _ForEmbedding
DeepseekV3ForSequenceClassification = _ForSequenceClassification
DistilBertForEmbedding = _ForEmbedding
DistilBertForMultipleChoice = _ForMultipleChoice
DistilBertForQuestionAnswering = _ForQuestionAnswering
DistilBertForSequenceClassification = _ForSequenceClassification
DistilBertForTokenClassification = _ForTokenClassification
DistillationConfig = _DistillationConfig
Dots1ForEmbedding = _ForEmbedding
Dots1ForSequenceClassification = _ForSequenceClassification
DraftConfig = _DraftConfig
EasyDeLRuntimeError = _EasyDeLRuntimeError
EasyDeLSyntaxRuntimeError = _EasyDeLSyntaxRuntimeError
EasyDeLTimerError = _EasyDeLTimerError
ElectraForEmbedding = _ForEmbedding
ElectraForMultipleChoice = _ForMultipleChoice
ElectraForQuestionAnswering = _ForQuestionAnswering
ElectraForSequenceClassification = _ForSequenceClassification
ElectraForTokenClassification = _ForTokenClassification
EmbeddingConfig = _EmbeddingConfig
EngineRequest = _EngineRequest
EngineRequestStatus = _EngineRequestStatus
Ernie4_5ForEmbedding = _ForEmbedding
Ernie4_5ForSequenceClassification = _ForSequenceClassification
Ernie4_5_MoeForEmbedding = _ForEmbedding
Ernie4_5_MoeForSequenceClassification = _ForSequenceClassification
Exaone4ForEmbedding = _ForEmbedding
Exaone4ForSequenceClassification = _ForSequenceClassification
ExaoneForEmbedding = _ForEmbedding
ExaoneForSequenceClassification = _ForSequenceClassification
ExaoneMoeForEmbedding = _ForEmbedding
ExaoneMoeForSequenceClassification = _ForSequenceClassification
FalconForEmbedding = _ForEmbedding
FalconForSequenceClassification = _ForSequenceClassification
FalconH1ForEmbedding = _ForEmbedding
FalconH1ForSequenceClassification = _ForSequenceClassification
FalconMambaForEmbedding = _ForEmbedding
FalconMambaForSequenceClassification = _ForSequenceClassification
FlashAttentionConfig = _FlashAttentionConfig
FlashAttn: _Mechanism
FlexOlmoForEmbedding = _ForEmbedding
FlexOlmoForSequenceClassification = _ForSequenceClassification
FlexibleAttentionModule = _FlexibleAttentionModule
GFPOConfig = _GFPOConfig
GKDConfig = _GKDConfig
GPTBigCodeForEmbedding = _ForEmbedding
GPTBigCodeForSequenceClassification = _ForSequenceClassification
GPTJForEmbedding = _ForEmbedding
GPTJForSequenceClassification = _ForSequenceClassification
GPTNeoForEmbedding = _ForEmbedding
GPTNeoForSequenceClassification = _ForSequenceClassification
GPTNeoXForEmbedding = _ForEmbedding
GPTNeoXForSequenceClassification = _ForSequenceClassification
GRPOConfig = _GRPOConfig
GSPOConfig = _GSPOConfig
Gemma2ForEmbedding = _ForEmbedding
Gemma2ForSequenceClassification = _ForSequenceClassification
Gemma3Config = _Gemma3Config
Gemma3ForEmbedding = _ForEmbedding
Gemma3ForSequenceClassification = _ForSequenceClassification
Gemma3Model = _Gemma3Model
Gemma3MultiModalProjector = _Gemma3MultiModalProjector
Gemma3TextConfig = _Gemma3TextConfig
Gemma3TextModel = _Gemma3TextModel
Gemma4ForCausalLM = _Gemma4ForCausalLM
Gemma4RMSNorm = _Gemma4RMSNorm
Gemma4TextForEmbedding = _ForEmbedding
Gemma4TextForSequenceClassification = _ForSequenceClassification
Gemma4VisionModel = _Gemma4VisionModel
GemmaForEmbedding = _ForEmbedding
GemmaForSequenceClassification = _ForSequenceClassification
Glm4ForEmbedding = _ForEmbedding
Glm4ForSequenceClassification = _ForSequenceClassification
Glm4MoeForEmbedding = _ForEmbedding
Glm4MoeForSequenceClassification = _ForSequenceClassification
Glm4MoeLiteForEmbedding = _ForEmbedding
Glm4MoeLiteForSequenceClassification = _ForSequenceClassification
Glm4vMoeTextForEmbedding = _ForEmbedding
Glm4vMoeTextForSequenceClassification = _ForSequenceClassification
Glm4vMoeVisionModel = _Glm4vMoeVisionModel
Glm4vTextForEmbedding = _ForEmbedding
Glm4vTextForSequenceClassification = _ForSequenceClassification
Glm4vVisionModel = _Glm4vVisionModel
GlmForEmbedding = _ForEmbedding
GlmForSequenceClassification = _ForSequenceClassification
GlmMoeDsaForEmbedding = _ForEmbedding
GlmMoeDsaForSequenceClassification = _ForSequenceClassification
GptOssForEmbedding = _ForEmbedding
GptOssForSequenceClassification = _ForSequenceClassification
GraniteForEmbedding = _ForEmbedding
GraniteForSequenceClassification = _ForSequenceClassification
GraniteMoeForEmbedding = _ForEmbedding
GraniteMoeForSequenceClassification = _ForSequenceClassification
GraniteMoeHybridForEmbedding = _ForEmbedding
GraniteMoeHybridForSequenceClassification = _ForSequenceClassification
GraniteMoeSWAForEmbedding = _ForEmbedding
GraniteMoeSWAForSequenceClassification = _ForSequenceClassification
GraniteMoeSharedForEmbedding = _ForEmbedding
GraniteMoeSharedForSequenceClassification = _ForSequenceClassification
GraniteSWAForEmbedding = _ForEmbedding
GraniteSWAForSequenceClassification = _ForSequenceClassification
Grok1ForEmbedding = _ForEmbedding
Grok1ForSequenceClassification = _ForSequenceClassification
HeliumForEmbedding = _ForEmbedding
HeliumForSequenceClassification = _ForSequenceClassification
HunYuanDenseV1ForEmbedding = _ForEmbedding
HunYuanDenseV1ForSequenceClassification = _ForSequenceClassification
HunYuanMoEV1ForEmbedding = _ForEmbedding
HunYuanMoEV1ForSequenceClassification = _ForSequenceClassification
HyperCLOVAXForEmbedding = _ForEmbedding
HyperCLOVAXForSequenceClassification = _ForSequenceClassification
IQuestCoderForEmbedding = _ForEmbedding
IQuestCoderForSequenceClassification = _ForSequenceClassification
IWOPDConfig = _IWOPDConfig
ImageClassificationConfig = _ImageClassificationConfig
InternLM2ForEmbedding = _ForEmbedding
InternLM2ForSequenceClassification = _ForSequenceClassification
InternLM3ForEmbedding = _ForEmbedding
InternLM3ForSequenceClassification = _ForSequenceClassification
Jais2ForEmbedding = _ForEmbedding
Jais2ForSequenceClassification = _ForSequenceClassification
JambaForEmbedding = _ForEmbedding
JambaForSequenceClassification = _ForSequenceClassification
JitableSamplingParams = _JitableSamplingParams
KTOConfig = _KTOConfig
KimiK2ForEmbedding = _ForEmbedding
KimiK2ForSequenceClassification = _ForSequenceClassification
KimiLinearForEmbedding = _ForEmbedding
KimiLinearForSequenceClassification = _ForSequenceClassification
Kolibri1ForEmbedding = _ForEmbedding
Kolibri1ForSequenceClassification = _ForSequenceClassification
Lfm2ForEmbedding = _ForEmbedding
Lfm2ForSequenceClassification = _ForSequenceClassification
Lfm2MoeForEmbedding = _ForEmbedding
Lfm2MoeForSequenceClassification = _ForSequenceClassification
Llama4ForCausalLM = _Llama4ForCausalLM
Llama4ForSequenceClassification = _ForSequenceClassification
Llama4TextForEmbedding = _ForEmbedding
Llama4TextForSequenceClassification = _ForSequenceClassification
LlamaForEmbedding = _ForEmbedding
LlamaForSequenceClassification = _ForSequenceClassification
LongcatFlashForEmbedding = _ForEmbedding
LongcatFlashForSequenceClassification = _ForSequenceClassification
MLMConfig = _MLMConfig
MPNetForEmbedding = _ForEmbedding
MPNetForMultipleChoice = _ForMultipleChoice
MPNetForQuestionAnswering = _ForQuestionAnswering
MPNetForSequenceClassification = _ForSequenceClassification
MPNetForTokenClassification = _ForTokenClassification
Mamba2ForEmbedding = _ForEmbedding
Mamba2ForSequenceClassification = _ForSequenceClassification
MambaForEmbedding = _ForEmbedding
MambaForSequenceClassification = _ForSequenceClassification
MiniCPM3ForEmbedding = _ForEmbedding
MiniCPM3ForSequenceClassification = _ForSequenceClassification
MiniMaxForEmbedding = _ForEmbedding
MiniMaxForSequenceClassification = _ForSequenceClassification
MiniMaxM2ForEmbedding = _ForEmbedding
MiniMaxM2ForSequenceClassification = _ForSequenceClassification
Ministral3ForEmbedding = _ForEmbedding
Ministral3ForSequenceClassification = _ForSequenceClassification
MinistralForEmbedding = _ForEmbedding
MinistralForSequenceClassification = _ForSequenceClassification
MistralForEmbedding = _ForEmbedding
MistralForSequenceClassification = _ForSequenceClassification
MixtralForEmbedding = _ForEmbedding
MixtralForSequenceClassification = _ForSequenceClassification
ModernBertForEmbedding = _ForEmbedding
ModernBertForMultipleChoice = _ForMultipleChoice
ModernBertForQuestionAnswering = _ForQuestionAnswering
ModernBertForSequenceClassification = _ForSequenceClassification
ModernBertForTokenClassification = _ForTokenClassification
MptForEmbedding = _ForEmbedding
MptForSequenceClassification = _ForSequenceClassification
MultipleChoiceConfig = _MultipleChoiceConfig
NanoChatForEmbedding = _ForEmbedding
NanoChatForSequenceClassification = _ForSequenceClassification
NashMDConfig = _NashMDConfig
NemotronForEmbedding = _ForEmbedding
NemotronForSequenceClassification = _ForSequenceClassification
NemotronHForEmbedding = _ForEmbedding
NemotronHForSequenceClassification = _ForSequenceClassification
NomicBertForEmbedding = _ForEmbedding
NomicBertForSequenceClassification = _ForSequenceClassification
NomicBertForTokenClassification = _ForTokenClassification
OPTForEmbedding = _ForEmbedding
OPTForSequenceClassification = _ForSequenceClassification
ORPOConfig = _ORPOConfig
Olmo2ForEmbedding = _ForEmbedding
Olmo2ForSequenceClassification = _ForSequenceClassification
Olmo3ForEmbedding = _ForEmbedding
Olmo3ForSequenceClassification = _ForSequenceClassification
OlmoForEmbedding = _ForEmbedding
OlmoForSequenceClassification = _ForSequenceClassification
OlmoHybridForEmbedding = _ForEmbedding
OlmoHybridForSequenceClassification = _ForSequenceClassification
OlmoeForEmbedding = _ForEmbedding
OlmoeForSequenceClassification = _ForSequenceClassification
OnPolicyDistillationConfig = _OnPolicyDistillationConfig
OpenELMForEmbedding = _ForEmbedding
OpenELMForSequenceClassification = _ForSequenceClassification
OperationImpl = _OperationImpl
OperationMetadata = _OperationMetadata
OperationRegistry = _OperationRegistry
PPOConfig = _PPOConfig
PRMConfig = _PRMConfig
PagedFlashAttn: _Mechanism
PersimmonForEmbedding = _ForEmbedding
PersimmonForSequenceClassification = _ForSequenceClassification
Phi3ForEmbedding = _ForEmbedding
Phi3ForSequenceClassification = _ForSequenceClassification
PhiForEmbedding = _ForEmbedding
PhiForSequenceClassification = _ForSequenceClassification
PhiMoeConfig = _PhiMoeConfig
PhiMoeForCausalLM = _PhiMoeForCausalLM
PhiMoeModel = _PhiMoeModel
PhimoeForEmbedding = _ForEmbedding
PhimoeForSequenceClassification = _ForSequenceClassification
PyTree = _PyTree
QuestionAnsweringConfig = _QuestionAnsweringConfig
Qwen2ForEmbedding = _ForEmbedding
Qwen2ForSequenceClassification = _ForSequenceClassification
Qwen2MoeForEmbedding = _ForEmbedding
Qwen2MoeForSequenceClassification = _ForSequenceClassification
Qwen2VLTextForEmbedding = _ForEmbedding
Qwen2VLTextForSequenceClassification = _ForSequenceClassification
Qwen2_5_VLTextForEmbedding = _ForEmbedding
Qwen2_5_VLTextForSequenceClassification = _ForSequenceClassification
Qwen3ForEmbedding = _ForEmbedding
Qwen3ForSequenceClassification = _ForSequenceClassification
Qwen3MoeForEmbedding = _ForEmbedding
Qwen3MoeForSequenceClassification = _ForSequenceClassification
Qwen3NextForEmbedding = _ForEmbedding
Qwen3NextForSequenceClassification = _ForSequenceClassification
Qwen3VLMoeTextForEmbedding = _ForEmbedding
Qwen3VLMoeTextForSequenceClassification = _ForSequenceClassification
Qwen3VLMoeVisionTransformerPretrainedModel = _Qwen3VLMoeVisionTransformerPretrainedModel
Qwen3VLTextForEmbedding = _ForEmbedding
Qwen3VLTextForSequenceClassification = _ForSequenceClassification
Qwen3VisionTransformerPretrainedModel = _Qwen3VisionTransformerPretrainedModel
Qwen3_5ForEmbedding = _ForEmbedding
Qwen3_5ForSequenceClassification = _ForSequenceClassification
Qwen3_5MoeForEmbedding = _ForEmbedding
Qwen3_5MoeForSequenceClassification = _ForSequenceClassification
RLOOConfig = _RLOOConfig
RLVRConfig = _RLVRConfig
RaggedPageAttentionv2Config = _RaggedPageAttentionv2Config
RaggedPageAttentionv3Config = _RaggedPageAttentionv3Config
RaggedPageAttnV2: _Mechanism
RaggedPageAttnV3: _Mechanism
RecurrentGemmaForEmbedding = _ForEmbedding
RecurrentGemmaForSequenceClassification = _ForSequenceClassification
RewardConfig = _RewardConfig
RingAttentionConfig = _RingAttentionConfig
RingAttn: _Mechanism
RobertaForEmbedding = _ForEmbedding
RobertaForMultipleChoice = _ForMultipleChoice
RobertaForQuestionAnswering = _ForQuestionAnswering
RobertaForSequenceClassification = _ForSequenceClassification
RobertaForTokenClassification = _ForTokenClassification
RwkvForEmbedding = _ForEmbedding
RwkvForSequenceClassification = _ForSequenceClassification
SDFTConfig = _SDFTConfig
SDPOConfig = _SDPOConfig
SFTConfig = _SFTConfig
ScaledDotProductAttentionConfig = _ScaledDotProductAttentionConfig
ScaledDotProductAttn: _Mechanism
SeedOssForEmbedding = _ForEmbedding
SeedOssForSequenceClassification = _ForSequenceClassification
SeqKDConfig = _SeqKDConfig
SequenceClassificationConfig = _SequenceClassificationConfig
SimPOConfig = _SimPOConfig
SmolLM3ForEmbedding = _ForEmbedding
SmolLM3ForSequenceClassification = _ForSequenceClassification
SpanCorruptionConfig = _SpanCorruptionConfig
SparseDistillationConfig = _SparseDistillationConfig
StableLmForEmbedding = _ForEmbedding
StableLmForSequenceClassification = _ForSequenceClassification
Starcoder2ForEmbedding = _ForEmbedding
Starcoder2ForSequenceClassification = _ForSequenceClassification
TPOConfig = _TPOConfig
TextDatasetInform = _TextDatasetInform
TokenClassificationConfig = _TokenClassificationConfig
ToolParser = _ToolParser
ToolParserManager = _ToolParserManager
VanillaAttn: _Mechanism
VaultGemmaForEmbedding = _ForEmbedding
VaultGemmaForSequenceClassification = _ForSequenceClassification
VisualDatasetInform = _VisualDatasetInform
WhisperTimeStampLogitsProcessor = _WhisperTimeStampLogitsProcessor
XLMRobertaForEmbedding = _ForEmbedding
XLMRobertaForMultipleChoice = _ForMultipleChoice
XLMRobertaForQuestionAnswering = _ForQuestionAnswering
XLMRobertaForSequenceClassification = _ForSequenceClassification
XLMRobertaForTokenClassification = _ForTokenClassification
XPOConfig = _XPOConfig
YoutuForEmbedding = _ForEmbedding
YoutuForSequenceClassification = _ForSequenceClassification
auto_pytree = _auto_pytree
build_dataset = _build_dataset
ePath = _ePath
ePathLike = _ePathLike
eSurgeLMEvalAdapter = _eSurgeLMEvalAdapter
eSurgeRunner = _eSurgeRunner
ejit = _ejit
init_cluster = _init_cluster
is_inference_mode = _is_inference_mode
prompt_transforms = _prompt_transforms
set_inference_mode = _set_inference_mode
traversals = _traversals
infra: ModuleType
inference: ModuleType
modules: ModuleType
trainers: ModuleType
caching: ModuleType
data: ModuleType
escale: ModuleType
layers: ModuleType
operations: ModuleType
utils: ModuleType
scripts: ModuleType
