"""Drafts: tokens that an answer may go on with, where they come from and how many are worth a try.  Layer: below
`generation`, which verifies them.  Engine thread."""
