"""Prompts computed ahead, while the engine is idle.  Imports audit, pipeline and below; event loop thread."""
