"""From a name to weights: resolve a model, read its configuration, tokenizer and tensors."""
