"""The decoding engine: target, cache, draft trees, verification, drafters, evaluation."""
