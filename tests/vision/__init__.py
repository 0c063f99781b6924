"""Images: processors, encoders and models that see."""
