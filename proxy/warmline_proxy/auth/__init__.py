"""Client keys, admin access and owners; imports http, store and errors; event loop, the key store any thread."""
