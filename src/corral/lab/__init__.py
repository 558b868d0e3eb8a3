"""Code behind the `corral` command: runs, tasks, comparisons, audits and reports. The library itself never imports it."""
