"""Files and batches: endpoints, and the worker that answers their lines."""
