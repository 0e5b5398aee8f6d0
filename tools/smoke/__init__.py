"""What a user gets: wheels in fresh environments, apart from the workspace and its lock."""
