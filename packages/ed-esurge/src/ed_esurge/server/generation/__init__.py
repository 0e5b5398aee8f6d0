"""From a request to the events of an answer: prompts, the engine, replies."""
