"""Tokenization of prompts' texts: of what is new in one, where most of it was tokenized before.  Any thread."""
