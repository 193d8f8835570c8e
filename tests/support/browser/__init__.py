"""Headless browser for the dashboard tests."""
