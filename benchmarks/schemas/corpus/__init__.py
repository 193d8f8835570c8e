"""The corpus: packages, what is fetched from them, and its schemas."""
