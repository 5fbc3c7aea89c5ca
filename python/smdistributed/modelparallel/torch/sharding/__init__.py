"""Parameters and optimizer states that are sharded over ranks."""
