"""Parsing of an answer's tokens to text, reasoning and tool calls, token by token.  Layer: above prompt."""
