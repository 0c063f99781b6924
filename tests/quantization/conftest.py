"""Fixtures of other folders that these tests use."""

from tests.cli.conftest import quire as quire
