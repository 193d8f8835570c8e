"""State of one request, its limits and its queue.  May import response, api and below.  Event loop thread."""
