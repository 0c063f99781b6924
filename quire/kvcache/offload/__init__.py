"""Blocks below the device: which of them are in host memory and on disk, and the transfers between the tiers."""
