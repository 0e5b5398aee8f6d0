"""Arrays in files: names, checksums, fingerprints, and space on a disk."""
