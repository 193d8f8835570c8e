"""JSON schemas: what a grammar can force of them, and what is checked once it is written.  Pure."""
