"""Moves plaintext credentials out of a live PostgreSQL into an encrypted secret store, and keeps them out."""

__version__ = "0.1.0"
