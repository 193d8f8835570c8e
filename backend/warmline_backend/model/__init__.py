"""The served model: loading, architectures and fingerprint.  Layer: above kv_cache and request.  Engine thread."""
