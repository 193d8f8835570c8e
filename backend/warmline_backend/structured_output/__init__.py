"""Structured output: constraints, checked when a prompt is rendered, and matchers that enforce them token by token.

A constraint belongs to the prompt and is shared; a matcher belongs to one run of one sequence.  Layer: above output.
Any thread, but for matchers: engine thread.
"""
