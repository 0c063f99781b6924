"""Reports the requests of one replica to the router. Used only when there are several replicas."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.adapter_use import adapter_identity
from quire.messages.outputs import StepOutputs
from quire.messages.request import NewRequest
from quire.output.processor import OutputProcessor
from quire.output.tracked import TrackedRequest
from quire.router import OpenRequest, RoutedRequest, Router

REPORT_STEPS = 32
"""Steps between progress reports to the router: reporting every token would cost more."""


@dataclass(slots=True, eq=False)
class FedRequest:
    """A request at the replica."""

    opened: OpenRequest
    tracked: TrackedRequest


class RouterFeed:
    """Reports first tokens, progress and ends to the router, from the outputs of steps."""

    def __init__(self, router: Router, name: str, keys: ContentKeys, outputs: OutputProcessor) -> None:
        self._router = router
        self._name = name
        self._keys = keys
        self._outputs = outputs
        self._open: dict[str, FedRequest] = {}
        self._waiting: set[str] = set()
        """Requests without a token yet."""
        self._steps = 0
        self.prompt_tokens = 0
        """Prompt tokens of all requests sent here."""
        self.expected_tokens = 0
        """Of these, tokens that the router expected to be cached here."""

    def launch(self, request: NewRequest) -> None:
        """The request is sent to the replica; the output processor tracks it already."""
        routed = as_routed(request)
        opened = self._router.launched(routed, self._name)
        self._open[request.id] = FedRequest(opened, self._outputs.tracked(request.id))
        self._waiting.add(request.id)
        self.prompt_tokens += routed.prompt_tokens
        self.expected_tokens += routed.prompt_tokens - opened.uncached

    def note(self, outputs: StepOutputs) -> None:
        """Outputs of a step, which the output processor has taken."""
        if self._waiting:
            for key in self._waiting.intersection(key for key, _ in outputs.keys):
                self._waiting.discard(key)
                self._report(self._open[key])
        self._steps += 1
        if self._steps % REPORT_STEPS == 0:
            for key, fed in self._open.items():
                if key not in self._waiting:
                    self._report(fed)
        for end in outputs.finished:
            ended = self._open.get(end.key[0])
            if ended is not None and ended.tracked.open == 0:
                self.end(end.key[0])

    def end(self, key: str) -> None:
        """The request has finished, or its reader has left."""
        fed = self._open.pop(key, None)
        if fed is None:
            return
        if key not in self._waiting:
            self._report(fed)
        self._waiting.discard(key)
        self._router.finished(fed.opened, self._all_keys(fed.tracked))

    def _report(self, fed: FedRequest) -> None:
        tracked = fed.tracked
        self._router.progress(fed.opened, sum(len(one.tokens) for one in tracked.sequences), tracked.num_cached)

    def _all_keys(self, tracked: TrackedRequest) -> list[bytes]:
        """Keys of the blocks of prompt and output; the last token has no KV."""
        request, size = tracked.request, self._keys.block_size
        keys = list(request.keys)
        if len(tracked.sequences) > 1 or not keys:
            return keys
        tokens = request.prompt[size * len(keys) :] + tracked.sequences[0].tokens[:-1]
        return keys + self._keys.keys_after(keys[-1], tokens, request.key_spans, size * len(keys))


def as_routed(request: NewRequest) -> RoutedRequest:
    """A request as the router sees it. Turns of sessions are not routed: `SessionAffinity` decides."""
    adapters = adapter_identity(request.adapters)
    return RoutedRequest(request.keys, len(request.prompt), request.num_sequences, request.tenant, adapters)
