"""Forced schemas: keyword by keyword, what a grammar can enforce.  Pure."""
