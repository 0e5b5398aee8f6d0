"""Files of other programs as run files: a table of keys for each program."""
