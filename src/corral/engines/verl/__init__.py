"""Integration with verl: policy losses, an engine whose head keeps a support, and trainers."""
