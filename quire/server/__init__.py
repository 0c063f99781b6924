"""The OpenAI-compatible server, and the text machines it reads answers with."""
