"""Images and videos: processors that turn pixels into items, and encoders that turn items into embeddings."""
