"""Explanation of cold starts; stabilized prompts.  Imports request, index, upstream; event loop or any thread."""
