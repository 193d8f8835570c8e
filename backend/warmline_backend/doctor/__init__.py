"""Checks of `warmline doctor`: a model's folder, whether a machine can serve it and how, without loading its weights.

Checks return findings; `examine` runs them in order and `report` prints them.  Weights are never evaluated: file
headers, names, shapes and types say all that is asked here.  May import every layer below server/; main thread.
"""
