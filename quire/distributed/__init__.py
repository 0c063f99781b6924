"""Ranks and collectives: how a model is cut over devices."""
