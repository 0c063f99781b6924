"""Parses a model's text into reasoning, content and tool calls. No HTTP, no engine."""
