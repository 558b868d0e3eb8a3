"""Language models that can be loaded by name: embedded in corral, from packages, from folders, or from the hub."""

EMBEDDED = ("tiny", "tiny-sums")
"""Names of the models that ship with corral, each in a folder of the same name beside this file."""

BUILT_IN = (*EMBEDDED, "smollm2", "gemma", "smoke")
"""Names of models that need neither a folder nor the hub."""
