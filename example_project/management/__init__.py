"""What the command line offers besides the package's own commands."""
