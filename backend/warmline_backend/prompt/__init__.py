"""Prompts: chat bodies checked, rendered by the model's template and tokenized.  Layer: above tool_parsers.  Any thread."""
