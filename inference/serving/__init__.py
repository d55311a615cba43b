"""An OpenAI-compatible server around a decoding engine."""
