"""Ranks agree on what they do. `facts` (what a rank did to its shards, as texts and one digest)."""
