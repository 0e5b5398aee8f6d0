"""`python -m EasyLM.scripts.benchmark_attention`: see `ed_elarge.easylm.commands`."""

from ed_elarge.easylm.commands import benchmark_attention as main

if __name__ == "__main__":
    main()
