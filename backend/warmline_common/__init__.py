"""What proxy and backend say to each other: messages, chain hashes, stream framing.  No mlx, no HTTP library."""
