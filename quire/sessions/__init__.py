"""Conversations by name: their tokens and turns, where their KV is, and the durable log that keeps them."""
