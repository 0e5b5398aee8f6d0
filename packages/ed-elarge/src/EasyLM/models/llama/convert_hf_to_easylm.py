"""`python -m EasyLM.models.llama.convert_hf_to_easylm`: see `ed_elarge.easylm.commands`."""

from ed_elarge.easylm.commands import convert_hf_to_easylm as main

if __name__ == "__main__":
    main()
