"""Life of a request in eight steps (DESIGN.md).  May import explain, request and below.  Event loop thread."""
