"""Prefix tree of stored segments: lookup, saves, eviction, sessions; above store/; writes on the writer thread."""
