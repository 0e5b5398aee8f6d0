"""`EasyDeLBaseConfig` and its execution fields."""
