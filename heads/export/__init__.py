"""Heads in the formats that other engines load: one file a format, with its writer, its reader and what it refuses."""
