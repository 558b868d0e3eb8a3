"""A run, whatever learns in it: its folder, its settings, what is seen of it, and who watches over it."""
