"""Options, command lines and recipes."""
