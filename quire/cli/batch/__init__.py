"""Batch files for `quire run-batch`, and running their requests through the server's routes in this process."""
