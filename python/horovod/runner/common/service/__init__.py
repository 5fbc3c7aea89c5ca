"""Services through which the parts of a job find each other."""
