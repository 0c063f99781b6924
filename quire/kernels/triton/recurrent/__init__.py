"""Recurrent layers on a GPU: one kernel for decodes; convolution, chunks and scan for prompts."""
