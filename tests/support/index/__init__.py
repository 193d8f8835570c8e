"""Helpers of index tests: saves, segment files, archives, truncation and damage."""
