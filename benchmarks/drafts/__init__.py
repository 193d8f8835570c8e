"""Drafts: what they gain on texts of several kinds, and whether answers stay the same."""
