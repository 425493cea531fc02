"""The measuring harness: `make bench` prints figures with their conditions and writes them as JSON."""
