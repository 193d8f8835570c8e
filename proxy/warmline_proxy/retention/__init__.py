"""Retention of stored conversations: pin, purge, truncate, collect garbage.  Imports auth.owners, index; any thread."""
