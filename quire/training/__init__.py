"""Training of draft heads: data, the target's features, the head in plain torch, and what is written."""
