"""Model architectures, one per file."""
