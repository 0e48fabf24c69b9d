"""HTTP: OpenAI's dialect, the cluster's state, tinychat."""
