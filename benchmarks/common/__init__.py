"""Parts that benchmarks share: printed tables, servers under test, large random models."""
