"""Smoke checks, one module a theme."""
