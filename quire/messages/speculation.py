"""What the planning half knows of a device's part in speculative decoding."""

from __future__ import annotations

import msgspec


class DeviceDrafts(msgspec.Struct, frozen=True):
    """What the device does about drafts."""

    proposes: bool = False
    """It has a proposer."""
    keeps_cache: bool = False
    """The proposer has layers that keep keys and values: where it is not run, its later guesses are worse."""
    needs_following: bool = False
    """The proposer reads the token after each chunk of a prompt."""
    verifies_with_prompts: bool = True
    """Decodes can verify drafts in steps that have chunks of prompts too."""
