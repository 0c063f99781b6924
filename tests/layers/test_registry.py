"""Names and dotted paths find their implementation; anything else is refused with the known names."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from quire.errors import ValidationError
from quire.layers.attention.base import attention_backend
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.registry import resolve


def test_a_backend_by_name_and_by_path() -> None:
    assert attention_backend("torch") is TorchPagedAttention
    assert attention_backend("quire.layers.attention.torch_paged.TorchPagedAttention") is TorchPagedAttention


def test_any_class_by_its_path() -> None:
    assert resolve("thing", "collections.OrderedDict", {}) is OrderedDict


@pytest.mark.parametrize("name", ["nonesuch", "no_such_pkg.Thing", "collections.NoSuchThing"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}.*known: cpu, torch") as caught:
        attention_backend(name)
    assert caught.value.value == name
