"""Client routes, middlewares and the route tables; imports every layer below app; event loop."""
