"""Fake service managers, stand-in processes and faulty servers for tests of `warmline`."""
