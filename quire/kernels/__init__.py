"""The arithmetic of a layer, one implementation a device behind one protocol (`base.py`)."""
