"""Clients that `warmline launch` starts."""
