"""What is done many times over: `make test-long`."""
