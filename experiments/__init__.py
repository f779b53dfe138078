"""What the papers claim, tried on small models of every rule side by side; see README.md."""
