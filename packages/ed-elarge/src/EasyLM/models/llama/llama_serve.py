"""`python -m EasyLM.models.llama.llama_serve`: see `ed_elarge.easylm.commands`."""

from ed_elarge.easylm.commands import llama_serve as main

if __name__ == "__main__":
    main()
