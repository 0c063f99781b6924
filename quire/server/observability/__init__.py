"""Who watches a server: metrics, log, traces."""
