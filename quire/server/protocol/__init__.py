"""Bodies of requests and answers: what they hold, and nothing of what is done with them."""
