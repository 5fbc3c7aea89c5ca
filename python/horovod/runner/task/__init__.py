"""The tasks on each host that search for common interfaces."""
