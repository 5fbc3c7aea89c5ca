"""What both frameworks' faces share. Needs no framework."""
