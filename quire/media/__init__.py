"""Media that requests name or carry: fetching and decoding, within limits."""
