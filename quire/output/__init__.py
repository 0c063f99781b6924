"""Tokens to text, in the caller's process: detokenizing, stop strings, what the user gets to see."""
