"""A very small trained model that calls tools, for tests of agents; see README.md beside this file."""
