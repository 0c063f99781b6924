"""Ranks and collectives: how a model is split over devices."""
