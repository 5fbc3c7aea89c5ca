"""More helpers of the launcher."""
