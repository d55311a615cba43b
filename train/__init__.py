"""Learn: one runnable file per draft head, the shared trainer and its options."""
