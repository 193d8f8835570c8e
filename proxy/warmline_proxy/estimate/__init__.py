"""Estimated durations of a request's parts, from recent ones; above store/; event loop thread."""
