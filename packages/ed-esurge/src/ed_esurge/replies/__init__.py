"""From a model's text to what it says, thinks and calls: tables of formats, one parser for all."""
