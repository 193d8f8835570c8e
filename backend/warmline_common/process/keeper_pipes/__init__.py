"""Pipes between the keeper and its backends: their command lines, and what they announce."""
