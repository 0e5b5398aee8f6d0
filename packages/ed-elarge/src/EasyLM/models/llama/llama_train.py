"""`python -m EasyLM.models.llama.llama_train`: see `ed_elarge.easylm.commands`."""

from ed_elarge.easylm.commands import llama_train as main

if __name__ == "__main__":
    main()
