"""Settings of all processes in one table, and how a value is chosen and parsed; above process/; any thread."""
