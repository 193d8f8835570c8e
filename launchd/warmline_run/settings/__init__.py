"""Flags of the warmline command and the reference table, made from warmline_common.settings."""
