"""Models by name: the embedded one, packaged ones, folders, and the hub."""

BUILT_IN = ("tiny", "smollm2", "gemma", "smoke")
"""Names of models that need neither a folder nor the hub."""
