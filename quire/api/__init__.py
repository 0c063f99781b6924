"""What Python users touch."""
