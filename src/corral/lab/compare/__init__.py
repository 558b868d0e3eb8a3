"""Comparisons of objectives or robot algorithms over settings and seeds, with equal budgets."""
