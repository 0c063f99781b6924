"""Speculative decoding: proposers of drafts, one file each. The registry and the host's proposers never reach torch."""
