"""What the launcher and its processes share."""
