"""Tiers below the device: which blocks are in host memory and on disk, and the transfers between the tiers."""
