"""Served models: a backend each, and which of them are loaded; below request/ and response/, event loop thread."""
