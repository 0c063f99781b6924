"""Chat templates: Jinja programs that come with models or requests, run with a bound on time and memory."""
