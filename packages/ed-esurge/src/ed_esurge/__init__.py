"""A serving engine for JAX language models: continuous batching, paged cache, OpenAI-compatible
server."""

from typing import TYPE_CHECKING

from ed_infra.lazy import attach

if TYPE_CHECKING:
    from ed_esurge.config import EngineConfig as EngineConfig
    from ed_esurge.engine import AsyncEngine as AsyncEngine
    from ed_esurge.engine import eSurge as eSurge
    from ed_esurge.lm_eval import eSurgeLM as eSurgeLM
    from ed_esurge.logged import LoggedRequest as LoggedRequest
    from ed_esurge.offline import LLM as LLM
    from ed_esurge.offline import LoRARequest as LoRARequest
    from ed_esurge.offline import StructuredOutputsParams as StructuredOutputsParams
    from ed_esurge.outputs import CompletionOutput as CompletionOutput
    from ed_esurge.outputs import Logprob as Logprob
    from ed_esurge.outputs import RequestMetrics as RequestMetrics
    from ed_esurge.outputs import RequestOutput as RequestOutput
    from ed_esurge.sampling import PoolingParams as PoolingParams
    from ed_esurge.sampling import SamplingParams as SamplingParams
    from ed_esurge.sampling import StructuredOutputs as StructuredOutputs
    from ed_esurge.server import serve as serve
    from ed_esurge.server.app import create_app as create_app

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AsyncEngine": "ed_esurge.engine",
        "CompletionOutput": "ed_esurge.outputs",
        "EngineConfig": "ed_esurge.config",
        "LLM": "ed_esurge.offline",
        "LoRARequest": "ed_esurge.offline",
        "LoggedRequest": "ed_esurge.logged",
        "Logprob": "ed_esurge.outputs",
        "PoolingParams": "ed_esurge.sampling",
        "RequestMetrics": "ed_esurge.outputs",
        "RequestOutput": "ed_esurge.outputs",
        "SamplingParams": "ed_esurge.sampling",
        "StructuredOutputs": "ed_esurge.sampling",
        "StructuredOutputsParams": "ed_esurge.offline",
        "create_app": "ed_esurge.server.app",
        "eSurge": "ed_esurge.engine",
        "eSurgeLM": "ed_esurge.lm_eval",
        "serve": "ed_esurge.server",
    },
)
