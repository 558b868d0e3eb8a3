"""An objective's loss of every row in one kernel."""
