"""Comparisons: contestants × settings × seeds as ordinary runs, side by side, with equal budgets."""
