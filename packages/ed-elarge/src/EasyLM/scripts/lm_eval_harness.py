"""`python -m EasyLM.scripts.lm_eval_harness`: see `ed_elarge.easylm.commands`."""

from ed_elarge.easylm.commands import lm_eval_harness as main

if __name__ == "__main__":
    main()
