"""Base of all processes: settings, logging, storage, protocol, measurement, process.  No mlx, no HTTP library."""
