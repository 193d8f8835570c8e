"""Durations that a process has measured, and models fitted to them.  Pure; imports nothing of this project."""
