"""Parsers of tool calls: one table of families, and their text formats.  Layer: above model.  Pure, any thread."""
