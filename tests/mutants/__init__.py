"""Deliberate mistakes in the package, each of which the model or the torture has to find: `make mutants`."""
