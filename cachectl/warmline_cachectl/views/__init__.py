"""Views of the index and the proxy: plain values, tables, trees; pure."""
