"""Reports: runs → statistics, tables and figures on one self-contained page."""
