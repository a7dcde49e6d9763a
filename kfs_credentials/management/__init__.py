"""What an operator types: parsing and printing."""
