"""Model families in Flax NNX that load and save Hugging Face checkpoints, number for number."""

from typing import TYPE_CHECKING

from ed_infra.lazy import attach

if TYPE_CHECKING:
    from ed_models.auto import (
        AutoEasyDeLAnyToAnyModel as AutoEasyDeLAnyToAnyModel,
    )
    from ed_models.auto import AutoEasyDeLConfig as AutoEasyDeLConfig
    from ed_models.auto import AutoEasyDeLModel as AutoEasyDeLModel
    from ed_models.auto import (
        AutoEasyDeLModelForAudioClassification as AutoEasyDeLModelForAudioClassification,
    )
    from ed_models.auto import AutoEasyDeLModelForCausalLM as AutoEasyDeLModelForCausalLM
    from ed_models.auto import AutoEasyDeLModelForCTC as AutoEasyDeLModelForCTC
    from ed_models.auto import AutoEasyDeLModelForEmbedding as AutoEasyDeLModelForEmbedding
    from ed_models.auto import (
        AutoEasyDeLModelForImageClassification as AutoEasyDeLModelForImageClassification,
    )
    from ed_models.auto import (
        AutoEasyDeLModelForImageTextToText as AutoEasyDeLModelForImageTextToText,
    )
    from ed_models.auto import AutoEasyDeLModelForMaskedLM as AutoEasyDeLModelForMaskedLM
    from ed_models.auto import (
        AutoEasyDeLModelForMultipleChoice as AutoEasyDeLModelForMultipleChoice,
    )
    from ed_models.auto import (
        AutoEasyDeLModelForQuestionAnswering as AutoEasyDeLModelForQuestionAnswering,
    )
    from ed_models.auto import AutoEasyDeLModelForReward as AutoEasyDeLModelForReward
    from ed_models.auto import AutoEasyDeLModelForSeq2SeqLM as AutoEasyDeLModelForSeq2SeqLM
    from ed_models.auto import (
        AutoEasyDeLModelForSequenceClassification as AutoEasyDeLModelForSequenceClassification,
    )
    from ed_models.auto import (
        AutoEasyDeLModelForSpeechSeq2Seq as AutoEasyDeLModelForSpeechSeq2Seq,
    )
    from ed_models.auto import (
        AutoEasyDeLModelForTokenClassification as AutoEasyDeLModelForTokenClassification,
    )
    from ed_models.auto import (
        AutoEasyDeLModelForZeroShotImageClassification as AutoEasyDeLModelForZeroShotImageClassification,  # noqa: E501
    )
    from ed_models.auto import AutoEasyDeLVisionModel as AutoEasyDeLVisionModel
    from ed_models.base.methods import EasyBridgeMixin as EasyBridgeMixin
    from ed_models.base.methods import EasyGenerationMixin as EasyGenerationMixin
    from ed_models.base.module import EasyDeLBaseModule as EasyDeLBaseModule
    from ed_models.generation.generate import GenerateOutput as GenerateOutput
    from ed_models.generation.token_choice import TokenChoice as TokenChoice

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AutoEasyDeLConfig": "ed_models.auto",
        "AutoEasyDeLModelForCausalLM": "ed_models.auto",
        "AutoEasyDeLModel": "ed_models.auto",
        "AutoEasyDeLModelForEmbedding": "ed_models.auto",
        "AutoEasyDeLModelForImageClassification": "ed_models.auto",
        "AutoEasyDeLAnyToAnyModel": "ed_models.auto",
        "AutoEasyDeLModelForImageTextToText": "ed_models.auto",
        "AutoEasyDeLModelForZeroShotImageClassification": "ed_models.auto",
        "AutoEasyDeLVisionModel": "ed_models.auto",
        "AutoEasyDeLModelForMaskedLM": "ed_models.auto",
        "AutoEasyDeLModelForTokenClassification": "ed_models.auto",
        "AutoEasyDeLModelForQuestionAnswering": "ed_models.auto",
        "AutoEasyDeLModelForMultipleChoice": "ed_models.auto",
        "AutoEasyDeLModelForReward": "ed_models.auto",
        "AutoEasyDeLModelForSeq2SeqLM": "ed_models.auto",
        "AutoEasyDeLModelForSequenceClassification": "ed_models.auto",
        "AutoEasyDeLModelForSpeechSeq2Seq": "ed_models.auto",
        "AutoEasyDeLModelForAudioClassification": "ed_models.auto",
        "AutoEasyDeLModelForCTC": "ed_models.auto",
        "EasyBridgeMixin": "ed_models.base.methods",
        "EasyDeLBaseModule": "ed_models.base.module",
        "EasyGenerationMixin": "ed_models.base.methods",
        "GenerateOutput": "ed_models.generation.generate",
        "TokenChoice": "ed_models.generation.token_choice",
    },
)
