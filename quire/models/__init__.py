"""Model architectures, one a file."""
