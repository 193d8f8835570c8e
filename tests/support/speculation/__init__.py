"""Drafts for tests."""
