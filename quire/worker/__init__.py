"""The executing half: tensors, and no policy."""
