"""What every room needs and none owns: files, processes, progress, names of models."""
