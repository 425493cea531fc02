"""Third-party test suites against a gateway, and which of their tests fail there, each with its reason."""
