"""One file per way to draft; `registry` builds any of them from the command line's words."""
