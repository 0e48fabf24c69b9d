"""GGUF files read where they lie: their tensors, and what stands in config.json elsewhere."""
