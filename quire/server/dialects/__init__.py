"""Converts other APIs' requests to chat requests, and answers back."""
