"""Language models: the embedded one, and the door to TRL."""
