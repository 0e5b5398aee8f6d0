"""The command line of the engine: `main` reads it, the other files are its commands."""
