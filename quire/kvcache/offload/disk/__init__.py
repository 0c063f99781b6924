"""Blocks on disk, found by content: segment files within a budget of bytes, kept over restarts and crashes."""
