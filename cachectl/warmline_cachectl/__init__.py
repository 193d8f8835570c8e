"""Command cachectl: reads the index, changes it through the proxy or under the home's lock; above the proxy."""
