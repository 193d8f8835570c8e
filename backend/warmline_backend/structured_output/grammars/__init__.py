"""Grammars in llguidance's Lark: text, literals, values and tool calls.  Pure."""
