"""Plans steps: which requests compute how many tokens."""
