"""Helpers of backend tests: engine and scheduler drivers, cold references, tokenizers, grammars, tool calls."""
