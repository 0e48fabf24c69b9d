"""Model cards, configurations, tokenizers."""
