"""The two kinds of run: language models and robots."""
