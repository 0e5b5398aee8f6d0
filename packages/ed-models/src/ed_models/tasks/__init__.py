"""Tasks other than language modeling on the body of a family: classifiers and embedders."""
