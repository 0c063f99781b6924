"""The loop and what watches it."""
