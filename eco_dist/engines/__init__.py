"""Adapters to whoever owns the shards. None of them contains arithmetic of the update."""
