"""Keeper of several models: one backend process a loaded model, and one memory that they share.  Event loop thread."""
