"""The search for interfaces that hosts have in common."""
