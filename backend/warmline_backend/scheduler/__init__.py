"""Step order of requests and residents under the memory budget.  Imports generation and all below.  Engine thread."""
