"""Home directory, durable file changes, locks, segment files; above protocol/; any thread."""
