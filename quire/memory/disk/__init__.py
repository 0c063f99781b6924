"""What outlives the process: KV blocks on disk, found by content (`store`), and conversations by name (`sessions`)."""
