"""Handlers of the admin API and their route tables; imports the proxy's services, not routes; event loop."""
