"""What runs on each host for that."""
