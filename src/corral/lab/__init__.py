"""Everything behind the `corral` command: runs, tasks, comparisons, audits and reports. The library never imports it."""
