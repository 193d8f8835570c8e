"""Quantized KV with keys and values apart: its cache and its attention.  Layer: below codecs.  Engine thread."""
