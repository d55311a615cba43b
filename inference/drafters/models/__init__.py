"""Drafters that run a second, smaller model or a part of the target."""
