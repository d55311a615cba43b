"""Ways to draft, one file each; `registry` builds any of them from a command-line argument."""
