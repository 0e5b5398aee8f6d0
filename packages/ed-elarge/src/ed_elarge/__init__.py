"""One YAML from data to a served model: the elarge runner and the `easydel` umbrella."""
