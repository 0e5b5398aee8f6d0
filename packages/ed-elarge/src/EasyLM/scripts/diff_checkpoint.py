"""`python -m EasyLM.scripts.diff_checkpoint`: see `ed_elarge.easylm.commands`."""

from ed_elarge.easylm.commands import diff_checkpoint as main

if __name__ == "__main__":
    main()
