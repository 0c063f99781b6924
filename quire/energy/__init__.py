"""Joules: meters, who used them, and power as a budget. Knows requests by id and steps by duration; no tensors."""
