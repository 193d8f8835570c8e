"""Conversations out of a home into one file, and back in: `exporting`, `importing`; `archive` is what that file is."""
