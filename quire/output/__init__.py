"""Step outputs to request outputs, in the caller's process: detokenizing, stop strings, parsing."""
