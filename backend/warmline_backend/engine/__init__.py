"""The engine thread, and access to it from others.  Imports scheduler and all below."""
