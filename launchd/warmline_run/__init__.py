"""Command warmline: starts, supervises and checks the pair; imports warmline_common alone."""
