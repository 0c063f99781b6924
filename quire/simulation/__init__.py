"""Runs the real scheduler, caches and router over a virtual clock, with a cost model in place of the device."""
