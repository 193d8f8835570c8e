"""Terminal-Bench's agent, run against a pair by a Python of its own."""
