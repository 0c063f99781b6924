"""Scheduling policies: one file each."""
