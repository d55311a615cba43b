"""What is learned: draft heads, their blocks and their losses."""
