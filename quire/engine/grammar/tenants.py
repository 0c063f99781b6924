"""Which tenant's form is compiled next, and how many forms a tenant may have: one tenant's slow grammars delay its own
requests, not those of others."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from quire.engine.grammar.matcher import MatcherClient
from quire.errors import BusyError

KEPT_SHARE = 8
"""Of the matcher processes, one in so many is kept for tenants that have none."""


ALL_TENANTS = 4
"""How many times the forms of one tenant all together may have: a client may be able to choose its tenant."""


class TenantForms:
    """The forms of unfinished requests, by tenant."""

    def __init__(self, most: int | None) -> None:
        """`most`: forms that one tenant may have, waiting or in use, and a quarter of what all may; None: any
        number."""
        self._most = most
        self._owners: dict[str, tuple[str, bytes]] = {}
        """Tenant and form of each request."""
        self._forms: dict[str, Counter[bytes]] = {}
        self._turns: dict[str, int] = {}
        """When a tenant last had a turn; only of tenants that have forms."""
        self._clock = itertools.count(1)

    def add(self, request_id: str, tenant: str, form: bytes) -> None:
        """A request with this form has come; raises if its tenant has too many others."""
        forms = self._forms.get(tenant, Counter())
        if self._most is not None and form not in forms:
            self._check(len(forms), self._most, "this tenant")
            self._check(sum(map(len, self._forms.values())), ALL_TENANTS * self._most, "all tenants")
        self._forms[tenant] = forms
        forms[form] += 1
        self._owners[request_id] = tenant, form

    def _check(self, count: int, most: int, whose: str) -> None:
        if count >= most:
            raise BusyError(
                f"{count} schemas, patterns or grammars of {whose} wait to be compiled or are in use; at most {most} "
                "(max_tenant_grammars). Try again later, or use the same ones in several requests"
            )

    def remove(self, request_id: str) -> None:
        """The request has ended."""
        if (owner := self._owners.pop(request_id, None)) is None:
            return
        tenant, form = owner
        forms = self._forms[tenant]
        forms[form] -= 1
        if not forms[form]:
            del forms[form]
        if not forms:
            del self._forms[tenant]
            self._turns.pop(tenant, None)

    def tenants(self, matcher: MatcherClient) -> set[str]:
        """Whose requests use a matcher."""
        return {self._owners[request_id][0] for request_id in matcher.users if request_id in self._owners}

    def choose(
        self, unstarted: Iterable[MatcherClient], started: Iterable[MatcherClient], slots: int, processes: int
    ) -> MatcherClient | None:
        """The form to compile next: of the tenant with the fewest that are being compiled, the one whose last turn is
        longest ago; None if all have to wait. `slots`: compilations at once; a tenant that has none may start one more.
        `processes`: that matchers may have; the last ones are for tenants without any."""
        compiling: Counter[str] = Counter()
        held: Counter[str] = Counter()
        busy = taken = 0
        for matcher in started:
            tenants = self.tenants(matcher)
            held.update(tenants)
            taken += bool(matcher.users)
            if not matcher.is_compiled:
                compiling.update(tenants)
                busy += 1
        if busy > slots or (busy == slots and all(compiling[tenant] for tenant in self._forms)):
            return None
        best: tuple[int, int] | None = None
        chosen = None
        for matcher in unstarted:
            for tenant in self.tenants(matcher):
                is_new = not compiling[tenant]
                room = processes - taken - (processes // KEPT_SHARE if held[tenant] else 0)
                rank = compiling[tenant], self._turns.get(tenant, 0)
                if busy < slots + is_new and room > 0 and (best is None or rank < best):
                    best, chosen = rank, matcher
        if chosen is not None:
            now = next(self._clock)
            for tenant in self.tenants(chosen):
                self._turns[tenant] = now
        return chosen
