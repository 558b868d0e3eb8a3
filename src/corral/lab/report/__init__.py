"""Reports on runs: statistics, tables and figures on one self-contained HTML page."""
