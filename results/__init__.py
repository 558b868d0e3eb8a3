"""Studies: what was run, the raw rows that came out, and the pages and figures made of them (`make results`)."""
