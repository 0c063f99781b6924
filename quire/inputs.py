"""Prompt types, in vLLM's module: `from quire.inputs import TokensPrompt`."""

from quire.api.inputs import PromptType as PromptType
from quire.api.inputs import TextPrompt as TextPrompt
from quire.api.inputs import TokensPrompt as TokensPrompt
