"""Routing policies: what it costs to send a request to a replica."""
