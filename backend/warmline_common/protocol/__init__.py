"""Messages between proxy and backend, token hashes, server-sent events; above process/; any thread."""
