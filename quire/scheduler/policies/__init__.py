"""Who goes first, and who has to wait: one file a policy."""
