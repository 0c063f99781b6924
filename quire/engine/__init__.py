"""The engine: its loop, its process, and structured output."""
