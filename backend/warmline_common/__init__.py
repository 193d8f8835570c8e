"""Base of all processes: settings, logging, storage, protocol, process.  Lowest layer; no mlx, no HTTP library."""
