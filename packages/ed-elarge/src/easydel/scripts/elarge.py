"""`python -m easydel.scripts.elarge FILE`: the YAML runner under its older path."""

from ed_elarge.__main__ import main

if __name__ == "__main__":
    main()
