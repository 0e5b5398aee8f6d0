"""Child processes that do work on data of clients within limits of time and memory."""
