"""Drafters that read a trained draft head, one file per head."""
