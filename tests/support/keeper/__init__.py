"""Keepers in tests, over stand-ins for their backends."""
