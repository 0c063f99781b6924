"""What keeps a server up: the engine's supervisor, its pulse, and connections that are cut in time."""
