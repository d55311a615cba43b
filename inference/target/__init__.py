"""The target and how it runs: model, KV cache, attention masks, fused decoder, CUDA graphs."""
