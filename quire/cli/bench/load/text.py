"""Random text whose length in tokens is known beforehand, near enough, for any model."""

from __future__ import annotations

import random

_NOUNS = """
action activity age air area arm art attention author baby back bank bed behavior blood board body book boy
brother building business call campaign car case center chance change child choice church city class college
community company computer condition control cost country couple course court culture data day death decision
development difference director doctor door drug economy education effect effort end energy event experience eye
face fact family father field fight figure film fire floor foot force form friend future game girl goal
government ground group guy hair hand head health heart history home hospital hour house husband idea image
industry information interest issue job kind land law leader letter level life light line look lot love man
market material matter member mind minute moment money month morning mother movie music name nation need news
"""
WORDS = _NOUNS.split()
"""English nouns so common that every vocabulary of the last years has each as one token, with the space before it."""

CHARACTERS_A_TOKEN = 4
"""Of English prose, where there is no better way to tell a text's length in tokens."""


def random_words(tokens: int, draw: random.Random) -> str:
    """Text of about `tokens` tokens. No two begin alike, so that no prefix cache helps."""
    return " ".join(draw.choices(WORDS, k=tokens))


def random_characters(characters: int, draw: random.Random) -> str:
    """Text of exactly `characters` characters."""
    return random_words(characters // 3 + 1, draw)[:characters]


def about_tokens(text: str) -> int:
    """How many tokens a text has, roughly; at least 1."""
    return max(1, len(text) // CHARACTERS_A_TOKEN)
