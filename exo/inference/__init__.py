"""Engines: one step of a ragged batch through one shard."""
