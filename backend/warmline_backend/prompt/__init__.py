"""Prompts: chat bodies checked, rendered by a template and tokenized.  Layer: above tool_parsers.  Any thread."""
