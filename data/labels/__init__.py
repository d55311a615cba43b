"""Labels: what the target itself would say in the assistant's place, and the files that keep it."""
