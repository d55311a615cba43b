"""What heads learn from and are measured on: conversations, greedy labels, batches, benchmarks."""
