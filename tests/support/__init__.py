"""Support code of the tests: helpers, fakes, tiny models, oracle and storm."""
