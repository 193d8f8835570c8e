"""Backends of a keeper: processes and their HTTP client.  Event loop thread."""
