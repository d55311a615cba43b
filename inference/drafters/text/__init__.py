"""Drafters that read only the text: n-grams, prompt lookup, lookahead, REST."""
