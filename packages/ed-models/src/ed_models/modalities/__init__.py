"""What language models read besides text: images and recordings, one record for each layout."""
