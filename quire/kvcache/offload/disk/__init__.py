"""The disk tier: blocks found by content key in segment files, within a budget of bytes, kept over restarts."""
