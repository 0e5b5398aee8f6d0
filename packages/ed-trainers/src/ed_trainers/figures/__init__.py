"""What a run tells about itself: metrics, where they go, the progress bar."""
