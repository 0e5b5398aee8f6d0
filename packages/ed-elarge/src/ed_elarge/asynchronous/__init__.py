"""Online training with engines and environments in processes of their own."""
