"""One request: sequence, sampling, events, measured rates.  Imports structured_output and all below.  Engine thread."""
