"""Client APIs: bodies into one internal form, chunks into responses.  May import http and errors.  Pure."""
