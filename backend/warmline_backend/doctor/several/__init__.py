"""Examination of several configured models, and of the memory that they take together."""
