"""Training runs of language models and robots: run folder, settings, terminal output, and a guard against collapse."""
