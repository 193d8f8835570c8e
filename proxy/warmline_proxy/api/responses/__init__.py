"""OpenAI's Responses API.  Imports api.base and api.chunks.  Pure."""
