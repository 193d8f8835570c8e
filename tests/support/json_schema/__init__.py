"""Strings under the grammars of JSON schemas."""
