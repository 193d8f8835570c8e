"""Commands of cachectl, one module a group; above views/ and doctor/."""
