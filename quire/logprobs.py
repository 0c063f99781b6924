"""Log-probabilities, in vLLM's module: `from quire.logprobs import Logprob`."""

from quire.messages.outputs import FlatLogprobs as FlatLogprobs
from quire.messages.outputs import Logprob as Logprob

LogprobsOnePosition = dict[int, Logprob]
PromptLogprobs = list[LogprobsOnePosition | None]
SampleLogprobs = list[LogprobsOnePosition]
