"""Handlers of the admin API; imports the proxy's services, not routes; event loop."""
