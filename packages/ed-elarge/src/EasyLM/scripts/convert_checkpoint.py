"""`python -m EasyLM.scripts.convert_checkpoint`: see `ed_elarge.easylm.commands`."""

from ed_elarge.easylm.commands import convert_checkpoint as main

if __name__ == "__main__":
    main()
