"""Documents to tokens: tokenizers, chat templates, loss masks, worker processes."""
