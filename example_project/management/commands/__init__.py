"""The example project's commands."""
