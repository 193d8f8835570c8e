"""Durations that a process has measured, models fitted to them, and a model's memory.

Pure; imports nothing of this project.
"""
