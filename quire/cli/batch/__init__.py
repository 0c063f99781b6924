"""`quire run-batch`: a file of requests through the server's own routes, without a server."""
