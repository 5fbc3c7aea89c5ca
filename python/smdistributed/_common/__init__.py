"""Modules that both frameworks share. Importing them imports no framework."""
