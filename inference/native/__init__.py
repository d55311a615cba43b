"""Hot loops of CPU drafting in C++, compiled on first use."""
