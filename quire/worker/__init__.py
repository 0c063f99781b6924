"""The executing half: tensors, no scheduling decisions."""
