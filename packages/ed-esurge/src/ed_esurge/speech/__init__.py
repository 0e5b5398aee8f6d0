"""Speech to text: audio files to samples, and an engine for models that transcribe."""
