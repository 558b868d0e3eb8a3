"""Models by name: the embedded model, packaged models, folders, runs and the hub."""
