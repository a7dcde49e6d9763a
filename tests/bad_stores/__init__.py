"""Whole workers and services on stores that lie, hang, drip, are slow, full or read-only."""
