"""HTTP connections, bodies, CORS and request ids; imports config, errors and metrics; event loop."""
