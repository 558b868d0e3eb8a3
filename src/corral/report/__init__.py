"""Runs as pages for people: what happened, what can be claimed, and what it was made with."""
