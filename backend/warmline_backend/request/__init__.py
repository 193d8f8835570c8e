"""Fields of a request's body, checked and bounded.  Layer: above config only.  Pure, any thread."""
