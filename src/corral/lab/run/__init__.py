"""A training run of a language model or a robot: its folder, settings, terminal output, and guard against collapse."""
