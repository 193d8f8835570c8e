"""Decoding: groups that share a batch, what joins them, and the tokens that they sample.  Engine thread."""
