"""The compilation cache of XLA and the fingerprints that key compiled programs."""
