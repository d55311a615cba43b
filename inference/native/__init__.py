"""Two loops of drafting on a CPU in C++, compiled where they are first needed."""
