"""What stands on the body of a family beside its language-model head: classifiers, embedders."""
