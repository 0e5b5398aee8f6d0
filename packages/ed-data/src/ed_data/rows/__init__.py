"""Rows of a source to documents: fields, contents, chat arguments, images, splits."""
