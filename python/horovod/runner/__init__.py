"""Starting jobs."""
