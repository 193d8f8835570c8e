"""Start-up, verification, repair and rebuilding of the index; above index/; blocking."""
