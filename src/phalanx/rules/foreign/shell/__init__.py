"""Static reader of shell scripts: it follows what reaches a command line, and never runs anything."""
