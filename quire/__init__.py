"""quire: an LLM inference and serving engine.

from quire import LLM, SamplingParams
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)

# Threads of torch's own operations (OpenMP) spin for milliseconds by default before they sleep, and each waits for the
# one that lost its core; this is some ten microseconds. torch reads it when it is imported, so it is set first.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Imported on first use: `import quire` is fast, and the planning half never imports torch.
_EXPORTS = {
    "LLM": "quire.api.llm",
    "AsyncLLM": "quire.api.async_llm",
    "AsyncLLMEngine": "quire.api.async_llm",
    "LLMEngine": "quire.api.engine",
    "SamplingParams": "quire.messages.sampling",
    "StructuredOutputsParams": "quire.messages.structured",
    "RequestOutputKind": "quire.messages.sampling",
    "RequestOutput": "quire.messages.outputs",
    "CompletionOutput": "quire.messages.outputs",
    "Logprob": "quire.messages.outputs",
    "BeamSearchParams": "quire.messages.beams",
    "LoRARequest": "quire.messages.lora",
    "BeamSearchOutput": "quire.messages.outputs",
    "BeamSearchSequence": "quire.messages.outputs",
    "PoolingParams": "quire.messages.pooling",
    "PoolingOutput": "quire.messages.outputs",
    "PoolingRequestOutput": "quire.messages.outputs",
    "EmbeddingOutput": "quire.messages.outputs",
    "EmbeddingRequestOutput": "quire.messages.outputs",
    "ClassificationOutput": "quire.messages.outputs",
    "ClassificationRequestOutput": "quire.messages.outputs",
    "ScoringOutput": "quire.messages.outputs",
    "ScoringRequestOutput": "quire.messages.outputs",
    "EngineConfig": "quire.config",
    "EngineArgs": "quire.engine_args",
    "AsyncEngineArgs": "quire.engine_args",
    "FlexibleArgumentParser": "quire.engine_args",
    "TextPrompt": "quire.api.inputs",
    "TokensPrompt": "quire.api.inputs",
    "PromptType": "quire.api.inputs",
}

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM as AsyncLLM
    from quire.api.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from quire.api.engine import LLMEngine as LLMEngine
    from quire.api.inputs import PromptType as PromptType
    from quire.api.inputs import TextPrompt as TextPrompt
    from quire.api.inputs import TokensPrompt as TokensPrompt
    from quire.api.llm import LLM as LLM
    from quire.config import EngineConfig as EngineConfig
    from quire.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from quire.engine_args import EngineArgs as EngineArgs
    from quire.engine_args import FlexibleArgumentParser as FlexibleArgumentParser
    from quire.messages.beams import BeamSearchParams as BeamSearchParams
    from quire.messages.lora import LoRARequest as LoRARequest
    from quire.messages.outputs import BeamSearchOutput as BeamSearchOutput
    from quire.messages.outputs import BeamSearchSequence as BeamSearchSequence
    from quire.messages.outputs import ClassificationOutput as ClassificationOutput
    from quire.messages.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from quire.messages.outputs import CompletionOutput as CompletionOutput
    from quire.messages.outputs import EmbeddingOutput as EmbeddingOutput
    from quire.messages.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quire.messages.outputs import Logprob as Logprob
    from quire.messages.outputs import PoolingOutput as PoolingOutput
    from quire.messages.outputs import PoolingRequestOutput as PoolingRequestOutput
    from quire.messages.outputs import RequestOutput as RequestOutput
    from quire.messages.outputs import ScoringOutput as ScoringOutput
    from quire.messages.outputs import ScoringRequestOutput as ScoringRequestOutput
    from quire.messages.pooling import PoolingParams as PoolingParams
    from quire.messages.sampling import RequestOutputKind as RequestOutputKind
    from quire.messages.sampling import SamplingParams as SamplingParams
    from quire.messages.structured import StructuredOutputsParams as StructuredOutputsParams

__all__ = ["__version__", "__version_tuple__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
