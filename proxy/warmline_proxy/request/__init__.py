"""State of one request, its limits and its place in the queue.  May import response, api and below.  Event loop thread."""
