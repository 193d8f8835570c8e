"""Helpers of documentation tests: commands, code spans and messages of the documents, and a shell to run them."""
