"""Anthropic's Messages API.  Imports api.base and api.chunks.  Pure."""
