"""Caching reverse proxy in front of the backend; imports warmline_common; `app` wires its packages."""
