"""Model families, one architecture a file. Entry points name them, so nothing is imported here."""
