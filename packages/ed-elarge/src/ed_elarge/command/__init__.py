"""The command line `elarge`: a subcommand is a function of a module here and an entry of `main`."""
