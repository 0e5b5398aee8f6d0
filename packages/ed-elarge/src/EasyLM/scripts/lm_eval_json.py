"""`python -m EasyLM.scripts.lm_eval_json`: see `ed_elarge.evaluation.easylm_json`."""

from ed_elarge.evaluation.easylm_json import main

if __name__ == "__main__":
    main()
