"""A run of a language model or a robot: its folder, settings, view, and guard against collapse."""
