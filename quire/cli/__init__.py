"""The `quire` command."""
