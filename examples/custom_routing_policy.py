"""A custom routing policy: each tenant has a home replica, and leaves it only when the wait there is long."""

import asyncio
from zlib import crc32

from quire import AsyncLLM, SamplingParams
from quire.router.load import RoutedRequest
from quire.router.replica_state import ReplicaState

REPLICAS = 2
AWAY_SECONDS = 5.0


class ByTenant:
    """Costs are in seconds: another replica is used when the wait at home is 5 s longer than there."""

    def cost(self, request: RoutedRequest, replica: ReplicaState, now: float) -> float:
        is_home = crc32(request.tenant.encode()) % REPLICAS == int(replica.name)
        return replica.load.wait(now) + (0.0 if is_home else AWAY_SECONDS)


async def requests_served(max_tokens: int, **settings) -> list[int]:
    # The path could be any "package.module.Class". The policy runs in this process, in front of the engines.
    async with AsyncLLM(data_parallel_size=REPLICAS, routing_policy=f"{__name__}.ByTenant", **settings) as llm:
        for tenant in ("ann", "bob", "ann", "ann"):
            async for output in llm.generate("Hello,", SamplingParams(max_tokens=max_tokens), tenant=tenant):
                last = output
            print(f"{tenant}: {last.outputs[0].text!r}")
        metrics = [await replica.get_metrics() for replica in llm.replicas]
    return [int(one.value) for replica in metrics for one in replica if one.name == "quire:request_success"]


def main(max_tokens: int = 8, **settings) -> list[int]:
    served = asyncio.run(requests_served(max_tokens, **settings))
    print("requests at each replica:", served)
    return served


if __name__ == "__main__":
    main()
