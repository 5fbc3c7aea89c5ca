"""Jobs whose processes come and go; the core drives them (`smdrun elastic`)."""
