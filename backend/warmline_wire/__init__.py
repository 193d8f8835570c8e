"""What proxy and backend say to each other: messages, chain hashes, stream framing.  No I/O, no mlx, no HTTP library."""
