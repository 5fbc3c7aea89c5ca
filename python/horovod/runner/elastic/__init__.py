"""Jobs whose processes may join and leave; the core drives them (`smdrun elastic`)."""
