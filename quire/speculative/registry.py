"""Proposers by name. Never reaches torch: a proposer's module is imported when it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError
from quire.registry import resolve
from quire.speculative.config import DRAFT_MODEL, EAGLE3, GRAMMAR, MTP, NGRAM, SUFFIX, SpeculativeConfig
from quire.speculative.host import HostProposer

if TYPE_CHECKING:
    from quire.layers.build_context import BuildContext
    from quire.speculative.device import DeviceProposer

HOST = {
    SUFFIX: "quire.speculative.suffix.SuffixProposer",
    NGRAM: "quire.speculative.suffix.NgramLookup",
}
"""Called with the configuration."""
DEVICE = {
    NGRAM: "quire.speculative.ngram.make",
    DRAFT_MODEL: "quire.speculative.draft_model.make",
    EAGLE3: "quire.speculative.eagle3.make",
    MTP: "quire.speculative.mtp.make",
}
"""Called with the configuration, the target model and what layers are built from."""


def is_on_host(config: SpeculativeConfig, stages: int = 1) -> bool:
    """Whether drafts are proposed beside the scheduler. `stages`: pipeline stages; with several, no device has all that
    a proposer needs."""
    if config.method == SUFFIX or (config.method == NGRAM and stages > 1):
        return True
    return config.is_custom and _is_host_class(config, stages)


def make_host_proposer(config: SpeculativeConfig | None, stages: int = 1) -> HostProposer | None:
    """The proposer that runs beside the scheduler; None if drafts are made on the device, or none are."""
    if config is None or config.method == GRAMMAR or not is_on_host(config, stages):
        return None
    made: HostProposer = resolve("proposer", str(config.method), HOST)(config)
    return made


def make_device_proposer(
    config: SpeculativeConfig | None, target: Any, build: BuildContext, stages: int = 1
) -> DeviceProposer | None:
    """The proposer that runs after each step's draws; None if drafts are made on the host, or none are.

    target  the model whose draws are predicted
    build   what its layers were built from
    """
    if config is None or config.method == GRAMMAR or is_on_host(config, stages):
        return None
    made: DeviceProposer | None = resolve("proposer", str(config.method), DEVICE)(config, target, build)
    return made


def _is_host_class(config: SpeculativeConfig, stages: int) -> bool:
    """Whether a user's class implements `HostProposer`."""
    kind = resolve("proposer", str(config.method), {})
    if all(hasattr(kind, name) for name in ("start", "extend", "propose", "leave")):
        return True
    if not hasattr(kind, "propose") and isinstance(kind, type):
        raise ConfigError(
            f"speculative_config: {config.method} has no method propose: a proposer implements HostProposer "
            "(quire/speculative/host.py) or DeviceProposer (quire/speculative/device.py)",
            "method",
            config.method,
        )
    if stages > 1:
        raise ConfigError(
            f"speculative_config: {config.method} runs on the device, but pipeline_parallel_size is {stages}: no "
            "device has the whole model. Use ngram, suffix or a HostProposer",
            "method",
            config.method,
        )
    return False
