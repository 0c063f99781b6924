"""What the router is told of the requests at one replica. Nobody needs it where there is only one."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.outputs import StepOutputs
from quire.messages.request import NewRequest
from quire.output.processor import OutputProcessor
from quire.output.tracked import Tracked
from quire.router import RoutedFlight, RoutedRequest, Router

LOOK_STEPS = 32
"""The router learns so often how far requests have come: it costs a token next to nothing."""


@dataclass(slots=True, eq=False)
class RoutedTrip:
    """A request at the replica."""

    flight: RoutedFlight
    tracked: Tracked


class RouterFeed:
    """First tokens, how far requests are, and their ends, as steps tell them."""

    def __init__(self, router: Router, name: str, keys: ContentKeys, outputs: OutputProcessor) -> None:
        self._router = router
        self._name = name
        self._keys = keys
        self._outputs = outputs
        self._open: dict[str, RoutedTrip] = {}
        self._waiting: set[str] = set()
        """Requests without a token yet."""
        self._steps = 0
        self.prompt_tokens = 0
        """Of all requests that came here."""
        self.expected_tokens = 0
        """Of these, tokens that the router thought to be cached here."""

    def launch(self, request: NewRequest) -> None:
        """The request goes there. Its outputs are waited for already."""
        routed = as_routed(request)
        flight = self._router.launched(routed, self._name)
        self._open[request.id] = RoutedTrip(flight, self._outputs.tracked(request.id))
        self._waiting.add(request.id)
        self.prompt_tokens += routed.prompt_tokens
        self.expected_tokens += routed.prompt_tokens - flight.uncached

    def note(self, outputs: StepOutputs) -> None:
        """A step has told this, and it has been shown."""
        if self._waiting:
            for key in self._waiting.intersection(key for key, _ in outputs.keys):
                self._waiting.discard(key)
                self._tell(self._open[key])
        self._steps += 1
        if self._steps % LOOK_STEPS == 0:
            for key, trip in self._open.items():
                if key not in self._waiting:
                    self._tell(trip)
        for end in outputs.finished:
            trip = self._open.get(end.key[0])  # type: ignore[assignment]
            if trip is not None and trip.tracked.open == 0:
                self.end(end.key[0])

    def end(self, key: str) -> None:
        """Nothing more comes of the request, or nobody waits for it."""
        trip = self._open.pop(key, None)
        if trip is None:
            return
        if key not in self._waiting:
            self._tell(trip)
        self._waiting.discard(key)
        self._router.finished(trip.flight, self._all_keys(trip.tracked))

    def _tell(self, trip: RoutedTrip) -> None:
        tracked = trip.tracked
        self._router.progress(trip.flight, sum(len(one.tokens) for one in tracked.sequences), tracked.num_cached)

    def _all_keys(self, tracked: Tracked) -> list[bytes]:
        """Keys of the prompt's blocks and of those of what was generated; the last token has no KV."""
        request, size = tracked.request, self._keys.block_size
        keys = list(request.keys)
        if len(tracked.sequences) > 1 or not keys:
            return keys
        tokens = request.prompt[size * len(keys) :] + tracked.sequences[0].tokens[:-1]
        return keys + self._keys.after(keys[-1], tokens)


def as_routed(request: NewRequest) -> RoutedRequest:
    """A request as the router sees it. Sessions have homes of their own (`SessionHomes`)."""
    return RoutedRequest(request.id, request.keys, len(request.prompt), request.num_sequences, request.tenant)
