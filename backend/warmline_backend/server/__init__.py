"""HTTP routes and their operations.  Imports engine and all below.  Event loop thread."""
