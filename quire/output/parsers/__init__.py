"""How a model's text becomes an answer: thinking split off, tool calls read out. No HTTP, no engine."""
