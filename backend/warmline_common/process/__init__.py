"""Process helpers: console, exit codes, limits, loopback checks, redaction, parent watch; lowest layer; any thread."""
