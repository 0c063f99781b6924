"""Tests of quire.loading."""
