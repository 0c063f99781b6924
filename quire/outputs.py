"""Outputs of requests, in vLLM's module: `from quire.outputs import RequestOutput`."""

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
