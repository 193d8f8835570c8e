"""Homes and statuses for tests of cachectl, and the examples of its documentation."""
