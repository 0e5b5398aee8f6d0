"""`python -m EasyLM.models.llama.convert_easylm_to_hf`: see `ed_elarge.easylm.commands`."""

from ed_elarge.easylm.commands import convert_easylm_to_hf as main

if __name__ == "__main__":
    main()
