"""Crash points: scenarios of a home, killed at every disk step."""
