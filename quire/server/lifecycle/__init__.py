"""Keeps a server up: restarts engines, probes their health, limits connections."""
