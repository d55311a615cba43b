"""Several drafters in one draft tree."""
