"""What looks for the interfaces that hosts have in common."""
