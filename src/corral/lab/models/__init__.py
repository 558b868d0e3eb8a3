"""Models by name: the embedded one, packaged ones, folders, runs and the hub."""
