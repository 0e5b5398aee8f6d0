"""Arrays in files: names, checksums, fingerprints, room on a disk."""
