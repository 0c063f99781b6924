"""Parameters of requests, in vLLM's module: `from quire.sampling_params import SamplingParams`."""

from quire.messages.beams import BeamSearchParams as BeamSearchParams
from quire.messages.sampling import RequestOutputKind as RequestOutputKind
from quire.messages.sampling import SamplingParams as SamplingParams
from quire.messages.structured import StructuredOutputsParams as StructuredOutputsParams
