"""A key-value store over HTTP, in which members of a job leave what others need."""
