"""Storm: random clients and faults over a real pair, with checks of answers and leaks."""
