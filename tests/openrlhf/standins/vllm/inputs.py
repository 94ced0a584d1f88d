"""Stands in for vLLM's input types."""


class TokensPrompt(dict):
    """A dict, as in vLLM."""
