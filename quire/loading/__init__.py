"""Model loading: resolves a name to files, and reads configuration, tokenizer and weights."""
