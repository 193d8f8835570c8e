"""Regular expressions of ECMA-262: parsed, freed of assertions, and written for other engines.  Pure."""
