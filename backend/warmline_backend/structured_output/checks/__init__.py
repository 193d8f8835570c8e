"""Checks of an answer for what its grammar does not force, as its tokens come.  Engine thread."""
