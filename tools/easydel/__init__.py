"""Programs that run in the environment of the original EasyDeL."""
