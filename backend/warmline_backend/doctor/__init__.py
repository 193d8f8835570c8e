"""`warmline doctor`: whether a model's folder can be served on a machine, and how, without loading its weights.

Checks are functions that return findings; `examination` runs them in order, `report` shows what they found.  Weights
are never evaluated: file headers, names, shapes and types say all that is asked here.
"""
