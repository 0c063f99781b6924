"""Tool calls in the text of an answer: one file per format."""
