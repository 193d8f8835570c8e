"""Proxy with a fake backend on real sockets, and helpers of proxy tests."""
