"""Labels: what the target itself would say at every position, and the files that keep it."""
